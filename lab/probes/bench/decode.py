"""How fast the engine decodes with and without a draft, and where the time of a step goes.

Rounds are interleaved: every mode decodes the same prompts once a round, the order turned around every other round, so
that a drift of the machine meets all modes alike. The time by span is measured in a pass of its own, because bracketing
every span with a synchronisation slows the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt
from lab.parity.recording import PairUnderTest
from lab.probes.bench.clocks import SPANS, SpanClock
from lab.probes.bench.rounds import Round, Spread, Work, acceptance_length, interleave, within_rounds, without_taps


@dataclass(frozen=True)
class ModeResult:
    """One mode: plain decoding (k = 0) or k drafts a step.

    Attributes:
        rounds: in the order measured.
        span_ms: exclusive time a decode step by bar of `SPANS`, milliseconds, from the pass with timed spans.
        timed_step_ms: mean step in that pass; the bars add up to it.
        mean_acceptance_length: tokens a complete verify step; None for plain decoding.
    """

    k: int
    rounds: tuple[Round, ...]
    span_ms: dict[str, float]
    timed_step_ms: float
    mean_acceptance_length: float | None

    @property
    def name(self) -> str:
        """ "baseline" or "spec-k"."""
        return f"spec-{self.k}" if self.k else "baseline"

    def spread(self, of: Callable[[Round], float]) -> Spread:
        """A quantity of every round."""
        return Spread(tuple(of(r) for r in self.rounds))


@dataclass(frozen=True)
class DecodeReport:
    """All modes over the same prompts in the same rounds.

    Attributes:
        modes: plain decoding first.
        n_divergent: by k, prompts whose tokens differ from plain decoding's (near-ties, or bugs: see token parity).
    """

    dtype: str
    device: str
    batch: int
    modes: tuple[ModeResult, ...]
    n_divergent: dict[int, int]

    def at(self, k: int) -> ModeResult:
        """The mode of `k` drafts a step."""
        return next(mode for mode in self.modes if mode.k == k)

    def speed_up(self, k: int, *, with_prefill: bool = False) -> Spread:
        """Tokens a second of spec-k over plain decoding's within each round, decoding only unless told otherwise."""
        return self._over_base(k, lambda r: r.tokens_per_s if with_prefill else r.decode_tokens_per_s)

    def step_over_base(self, k: int) -> Spread:
        """Time of a spec-k step over a plain step's within each round."""
        return self._over_base(k, lambda r: r.step_ms)

    def _over_base(self, k: int, of: Callable[[Round], float]) -> Spread:
        return within_rounds(self.at(k).spread(of).samples, self.modes[0].spread(of).samples)

    def row_values(self, mode: ModeResult) -> dict[str, Any]:
        """What is stored of a mode; a step's time is named so that it is not compared: a longer one may be better."""
        values: dict[str, Any] = {
            **mode.spread(lambda r: r.decode_tokens_per_s).values("decode_tokens_per_s"),
            **mode.spread(lambda r: r.tokens_per_s).values("tokens_per_s"),
            "step_ms_median": mode.spread(lambda r: r.step_ms).median,
            "n_tokens": mode.rounds[0].n_tokens,
            "n_steps": mode.rounds[0].n_steps,
        }
        if mode.k:
            values |= self.speed_up(mode.k).values("speedup")
            values |= self.speed_up(mode.k, with_prefill=True).values("with_prefill_speedup")
            values |= self.step_over_base(mode.k).values("step_over_base")
            values |= {"acceptance_length": mode.mean_acceptance_length, "n_divergent": self.n_divergent[mode.k]}
        return values

    def verdict(self, k: int) -> str:
        """How much faster or slower spec-k is, decoding only and with prefill, and what its step costs and commits."""
        mode, gain, whole = self.at(k), self.speed_up(k), self.speed_up(k, with_prefill=True)
        length = (
            "no complete step" if mode.mean_acceptance_length is None else f"{mode.mean_acceptance_length:.2f} tokens"
        )
        slows = f" Speculation slows this pair at spec-{k}." if gain.p90 < 1 else ""
        return (
            f"Decoding only, spec-{k} is {gain.median:.2f} times as fast as plain decoding ({gain.p10:.2f} to "
            f"{gain.p90:.2f} over {len(mode.rounds)} rounds, batch {self.batch}), with prefill {whole.median:.2f} times"
            f" ({whole.p10:.2f} to {whole.p90:.2f}): a step takes {self.step_over_base(k).median:.2f} times as long "
            f"and commits {length}.{slows}"
        )


def measure_decode(
    target: str | Path,
    draft: str | Path,
    prompts: Sequence[Prompt],
    ks: Sequence[int] = (3,),
    *,
    max_new_tokens: int = 64,
    dtype: str = "float32",
    device: str = "auto",
    batch: int = 1,
    rounds: int = 5,
    warmup: int = 1,
    on_round: Callable[[int], None] | None = None,
    norm_output: str = "",
) -> DecodeReport:
    """Decode the same prompts in every mode, round by round. End tokens are ignored, so that all do the same work.

    Args:
        target, draft: checkpoint directories.
        prompts: what to continue.
        ks: depths to compare with plain decoding.
        max_new_tokens: tokens a prompt.
        dtype, device: of the engine.
        batch: requests decoded together.
        rounds: measured rounds a mode, after `warmup` unmeasured ones.
        on_round: called with the number of each round before it starts, warm-up rounds below 0.
        norm_output: as of `PairUnderTest`.

    Raises:
        ExperimentError: no prompt, no depth, no round, or fewer than two tokens to generate.
    """
    if not prompts or not ks or min(ks) < 1 or rounds < 1 or warmup < 0 or max_new_tokens < 2:
        raise ExperimentError(
            f"{len(prompts)} prompts, depths {list(ks)}, {rounds} rounds, max_new_tokens {max_new_tokens}",
            "at least one prompt, depths of 1 to 8, one round or more, two tokens or more",
            "correct the arguments",
        )
    pair = PairUnderTest(Path(target), Path(draft), dtype, device, norm_output=norm_output)
    engines = _engines(pair, prompts, ks, max_new_tokens, batch)
    generation = GenerationConfig(max_new_tokens, ignore_eos=True)
    work = {k: Work(engine, [list(prompt.ids) for prompt in prompts], generation) for k, engine in engines.items()}
    measured = interleave({k: one.run for k, one in work.items()}, rounds=rounds, warmup=warmup, on_round=on_round)
    modes = tuple(with_spans(one, k, measured[k]) for k, one in work.items())
    n_divergent = {k: sum(a != b for a, b in zip(work[k].tokens, work[0].tokens, strict=True)) for k in ks}
    return DecodeReport(dtype, str(pair.torch_device), batch, modes, n_divergent)


def with_spans(work: Work, k: int, rounds: Sequence[Round]) -> ModeResult:
    """A mode's result, after one more pass with timed spans."""
    clock = SpanClock(work.engine.target.device)
    work.decode(clock)
    bars = {bar: clock.bars_us[bar] / clock.n_steps / 1e3 for bar in SPANS}
    length = acceptance_length(work.responses) if k else None
    return ModeResult(k, tuple(rounds), bars, clock.step_us / 1e3, length)


def _engines(
    pair: PairUnderTest, prompts: Sequence[Prompt], ks: Sequence[int], max_new_tokens: int, batch: int
) -> dict[int, Engine]:
    """An engine a mode, plain decoding first; the weights are read once and shared."""
    n_tokens = max(len(prompt.ids) for prompt in prompts) + max_new_tokens + 2 * (max(ks) + 1)
    deepest = pair.engine(max(ks), n_tokens=n_tokens, max_batch_size=min(batch, len(prompts)))
    spec = deepest.config.speculative_config
    assert spec is not None, "an engine of depth 1 or more has its speculative settings"
    engines = {0: Engine(without_taps(deepest.target), None, replace(deepest.config, speculative_config=None))}
    for k in ks:
        shallow = replace(spec, num_speculative_tokens=k, max_path_len=None, max_decoding_tokens=None)
        engines[k] = Engine(deepest.target, deepest.draft, replace(deepest.config, speculative_config=shallow))
    return engines
