"""What vLLM, SGLang and TensorRT-LLM say of their acceptance, in one form.

Names and units differ. Here a length is in tokens a verify step with the bonus token; a histogram counts steps by
accepted drafts, without it. Requests and iterations of one file are pooled, each step counted once.

* vLLM: `vllm bench serve --save-result`; its counters as JSON, as `LLM.get_metrics()` lists them, or as Prometheus has
  them. Counts by position are of all steps, so the histogram is their differences.
* SGLang: `meta_info` of responses with a histogram (`spec_correct_drafts_histogram`, before that
  `spec_accept_histogram`) or lengths (`accept_lens`); means of `bench_serving` and `/server_info`.
* TensorRT-LLM: iteration statistics (`specDecodingStats`), whose counts are over all requests of an iteration, so a
  histogram is known where each had one; reports of `trtllm-bench`; `avg_decoded_tokens_per_iter` of responses.

Source: vLLM 0.33, v1/spec_decode/metrics.py; SGLang 0.5.23, tokenizer_manager.py; TensorRT-LLM, executor/types.h and
bench/dataclasses/reporting.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.rows.values import number_of

LENGTH, RATE, TWO = "acceptance_length", "mean_acceptance_rate", "fraction_two_or_more"
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
MOST_DRAFTS = 1024  # in a step; the deepest that any engine takes have some dozens
Document = Mapping[str, Any]


@dataclass(frozen=True)
class Acceptance:
    """What a system says of its acceptance; None where it says nothing.

    Attributes:
        length: tokens a verify step, bonus included. rate: accepted drafts over drafted ones, 0..1.
        by_position: share of steps that accepted each position. n_steps: verify steps.
        histogram: entry a counts steps that accepted a drafts; empty where that is not told.
    """

    system: str
    length: float
    rate: float | None = None
    by_position: tuple[float, ...] = ()
    n_steps: int | None = None
    histogram: tuple[int, ...] = ()

    def values(self) -> dict[str, Any]:
        """Row values."""
        reached = (1.0, *self.by_position)
        given = [p / r if r else None for p, r in zip(self.by_position, reached, strict=False)]
        return {
            LENGTH: self.length,
            "mean_accepted_draft_tokens": self.length - 1,
            RATE: self.rate,
            TWO: self.by_position[0] if self.by_position else None,
            "acceptance_by_position": list(self.by_position),
            "acceptance_given_prefix": given,
            "accepted_histogram": list(self.histogram),
            "num_drafts": self.n_steps,
        }


def of_histogram(system: str, histogram: Sequence[int], rate: float | None = None) -> Acceptance:
    """The acceptance of counted steps.

    Raises:
        ValueError: no step, or a count below 0.
    """
    while histogram and not histogram[-1]:
        histogram = histogram[:-1]
    steps = sum(histogram)
    if steps <= 0 or min(histogram) < 0:
        raise ValueError(f"a histogram of {list(histogram)} steps")
    shares = tuple(sum(histogram[i + 1 :]) / steps for i in range(len(histogram) - 1))
    return Acceptance(system, 1 + sum(shares), rate, shares, steps, tuple(histogram))


def read_documents(documents: Sequence[Any]) -> list[Acceptance]:
    """What JSON objects report: pooled where they are of requests or iterations, else one of each.

    Raises:
        TypeError, ValueError, OverflowError: a value that is no number, or counts that contradict each other.
    """
    objects = [document for document in documents if isinstance(document, Mapping)]
    for pool in POOLS:
        pooled = pool(objects)
        if pooled is not None:
            return [pooled]
    read = ((reader(document) for reader in READERS) for document in objects)
    return [found for each in read if (found := next((one for one in each if one is not None), None)) is not None]


def _vllm_result(document: Document) -> Acceptance | None:
    """`vllm bench serve`: the rate in per cent."""
    length = number_of(document.get("spec_decode_acceptance_length"))
    if length is None:
        return None
    rate, steps = (number_of(document.get(f"spec_decode_{name}")) for name in ("acceptance_rate", "num_drafts"))
    shares = tuple(float(one) for one in document.get("spec_decode_per_position_acceptance_rates") or ())
    n = None if steps is None else int(steps)
    counts = [round(n * share) for share in shares] if n else []
    return Acceptance("vllm", length, None if rate is None else rate / 100, shares, n, _differences(n or 0, counts))


def _vllm_counters(document: Document) -> Acceptance | None:
    """vLLM's counters by their metric names, with or without `vllm:` and `_total`."""
    plain = {str(key).removeprefix("vllm:").removesuffix("_total"): value for key, value in document.items()}
    steps, drafted, accepted = (
        number_of(plain.get(f"spec_decode_num_{name}")) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if steps is None or accepted is None or steps <= 0:
        return None
    counts = [float(one) for one in plain.get("spec_decode_num_accepted_tokens_per_pos") or ()]
    if counts and abs(sum(counts) - accepted) > 0.5:
        raise ValueError(f"{sum(counts):.0f} accepted tokens by position, {accepted:.0f} in all")
    shares, rate = tuple(one / steps for one in counts), accepted / drafted if drafted else None
    histogram = _differences(int(steps), [int(one) for one in counts])
    return Acceptance("vllm", 1 + accepted / steps, rate, shares, int(steps), histogram)


def _differences(n_steps: int, counts: Sequence[int]) -> tuple[int, ...]:
    """The histogram of steps that accepted each position; empty where no chain gives these counts."""
    histogram = tuple(a - b for a, b in zip((n_steps, *counts), (*counts, 0), strict=True))
    return histogram if counts and min(histogram) >= 0 else ()


def _vllm_metrics(documents: Sequence[Document]) -> Acceptance | None:
    """The list of `LLM.get_metrics()`, an object a metric."""
    named = {str(one["name"]): one.get("values", one.get("value")) for one in documents if "name" in one}
    return _vllm_counters(named) if named else None


def _sglang_requests(documents: Sequence[Document]) -> Acceptance | None:
    """Responses, every one with its own histogram or its lengths."""
    total: Counter[int] = Counter()
    drafted = 0.0
    for meta in (meta for document in documents for meta in _meta_infos(document)):
        histogram = _sglang_histogram(meta)
        total.update(dict(enumerate(histogram)))
        for name in ("spec_num_proposed_drafts", "spec_draft_token_num"):
            if histogram and name in meta:
                drafted += float(meta[name])
                break
    if not total:
        return None
    accepted = sum(a * n for a, n in total.items())
    return of_histogram("sglang", _listed(total), accepted / drafted if drafted else None)


def _meta_infos(document: Document) -> Iterator[Document]:
    choices = document.get("choices")
    for one in (document, *(choices if isinstance(choices, list) else ())):
        meta = one.get("meta_info") if isinstance(one, Mapping) else None
        if isinstance(meta, Mapping):
            yield meta


def _sglang_histogram(meta: Document) -> list[int]:
    """Steps by accepted drafts. Entries of some versions count the bonus token: the number of accepted drafts tells."""
    lengths = meta.get("accept_lens") or meta.get("spec_accept_lens")
    if lengths:
        counts = Counter(int(one) - 1 for one in lengths)
        return _listed(counts)
    histogram = next(([int(n) for n in meta[name]] for name in HISTOGRAMS if meta.get(name)), [])
    told = next((meta[name] for name in ("spec_num_correct_drafts", "spec_accept_token_num") if name in meta), None)
    accepted = sum(a * n for a, n in enumerate(histogram))
    if told is None or not histogram or accepted == int(told):
        return histogram
    if not histogram[0] and accepted - sum(histogram) == int(told):
        return histogram[1:]
    raise ValueError(f"steps {histogram} beside {told} accepted drafts")


def _listed(counts: Counter[int]) -> list[int]:
    """The histogram of counts by accepted drafts."""
    least, most = min(counts), max(counts)
    if least < 0 or most > MOST_DRAFTS:
        raise ValueError(f"{least} to {most} accepted drafts in a step")
    return [counts[a] for a in range(most + 1)]


def _sglang_mean(document: Document) -> Acceptance | None:
    """`bench_serving` has `accept_length`; a server's state, or that of its schedulers, an average."""
    states = document.get("internal_states")
    candidates = [document, *(states if isinstance(states, list) else ()), *_meta_infos(document)]
    candidates = [one for one in candidates if isinstance(one, Mapping)]
    names = ("accept_length", "spec_accept_length", "avg_spec_accept_length", "acc_length")
    lengths = [value for one in candidates for name in names if (value := number_of(one.get(name))) is not None]
    if not lengths:
        return None
    rates = [value for one in candidates if (value := number_of(one.get("spec_accept_rate"))) is not None]
    return Acceptance("sglang", sum(lengths) / len(lengths), rates[0] if rates else None)


def _trt_iterations(documents: Sequence[Document]) -> Acceptance | None:
    """Iterations with drafts; those of other attention ranks repeat the counts of the first."""
    drafted = accepted = steps = 0
    alone: Counter[int] = Counter()
    for document in documents:
        spec = document.get("specDecodingStats")
        if not isinstance(spec, Mapping) or document.get("attentionDpRank") or not spec.get("numDraftTokens"):
            continue
        requests, taken = int(spec["numRequestsWithDraftTokens"]), int(spec["numAcceptedTokens"])
        drafted, accepted, steps = drafted + int(spec["numDraftTokens"]), accepted + taken, steps + requests
        if requests == 1:
            alone[taken] += 1
    if not steps:
        return None
    if sum(alone.values()) == steps:
        return of_histogram("tensorrt-llm", _listed(alone), accepted / drafted)
    return Acceptance("tensorrt-llm", 1 + accepted / steps, accepted / drafted, n_steps=steps)


def _trt_bench(document: Document) -> Acceptance | None:
    """A report of `trtllm-bench`, whose averages weigh every iteration alike."""
    stats = document.get("decoding_stats")
    if not isinstance(stats, Mapping):
        return None
    names = ("acceptance_length_percentiles", "draft_acceptance_rate_percentiles")
    tables = [table if isinstance(table := stats.get(name), Mapping) else {} for name in names]
    length, rate = (number_of(table.get("average")) for table in tables)
    return None if length is None else Acceptance("tensorrt-llm", length, rate)


def _trt_responses(documents: Sequence[Document]) -> Acceptance | None:
    """Responses with a mean each, weighted by their iterations where the number of tokens is told."""
    weights: list[tuple[float, float]] = []
    for document in documents:
        choices = document.get("choices")
        for one in (document, *(choices if isinstance(choices, list) else ())):
            mean = number_of(one.get("avg_decoded_tokens_per_iter")) if isinstance(one, Mapping) else None
            if mean is not None:
                usage = document.get("usage")
                tokens = number_of(usage.get("completion_tokens")) if isinstance(usage, Mapping) else None
                weights.append((mean, tokens / mean if tokens and mean > 0 else 1.0))
    if not weights:
        return None
    return Acceptance("tensorrt-llm", sum(mean * n for mean, n in weights) / sum(n for _, n in weights))


# Of many objects one acceptance, and of one object one; the first that finds its names is taken.
POOLS: tuple[Callable[[Sequence[Document]], Acceptance | None], ...] = (
    _vllm_metrics, _sglang_requests, _trt_iterations, _trt_responses,
)  # fmt: skip
READERS: tuple[Callable[[Document], Acceptance | None], ...] = (_vllm_result, _vllm_counters, _sglang_mean, _trt_bench)
