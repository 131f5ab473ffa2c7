"""What is measured of prompts that are read, and whether it is what was promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from lab.probes.proofs.check import Verdict

N_TOLD = 4  # stages that a verdict names


@dataclass(frozen=True)
class ReadingTimes:
    """A load, measured.

    Attributes:
        first_ms: to the last first token, a round each. device_ms: of the passes of a round and of what ends prompts.
        n_passes: of a round. n_tokens: of all prompts. bound_ms: least. peer_ms: plain torch's, None where it was not
            run, for the reason in `peer_reason`. right: whether the tokens are the planted ones.
        stage_ms: of each stage of the passes, run one by one and waited for; empty where they were not taken apart.
    """

    first_ms: tuple[float, ...]
    device_ms: tuple[float, ...]
    n_passes: int
    n_tokens: int
    bound_ms: float
    flops: int
    peer_ms: float | None
    peer_reason: str
    right: Verdict
    stage_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens read a second, at the median."""
        return 1e3 * self.n_tokens / median(self.first_ms)


def judge_load(found: ReadingTimes, most_ms: float | None) -> Verdict:
    """Whether the tokens are right and the last first token came in time."""
    first, device = median(found.first_ms), median(found.device_ms)
    values = {
        **found.right.values, "first_token_ms": first, "first_token_ms_rounds": list(found.first_ms),
        "device_ms": device, "n_passes": found.n_passes, "tokens_per_s": found.tokens_per_s,
        "tflop_per_s": found.flops / device / 1e9, "bound_ms": found.bound_ms, "over_bound": first / found.bound_ms,
    }  # fmt: skip
    values |= {"most_ms": most_ms} if most_ms is not None else {}
    peer = f"plain torch did not run: {found.peer_reason}"
    if found.peer_ms is not None:
        values |= {"peer_ms": found.peer_ms, "over_peer": first / found.peer_ms}
        peer = f"plain torch {found.peer_ms:.1f}"
    values |= {f"stage_ms.{name}": ms for name, ms in found.stage_ms.items()}
    longest = sorted(found.stage_ms.items(), key=lambda stage: -stage[1])[:N_TOLD]
    stages = "".join(f", {name} {ms:.1f}" for name, ms in longest)
    limit = "" if most_ms is None else f" (at most {most_ms:g})"
    detail = (
        f"{found.right.detail}; first token after {first:.1f} ms{limit}, passes {device:.1f}, bound "
        f"{found.bound_ms:.1f}, {peer}{'; run one by one' if stages else ''}{stages}"
    )
    is_met = most_ms is None or first <= most_ms
    return Verdict(None if found.right.held is None else found.right.held and is_met, detail, values)


def judge_rate(many: ReadingTimes, rated: ReadingTimes, least: float) -> Verdict:
    """Whether many short prompts are read at the share of one long prompt's token rate that is promised."""
    ratio = many.tokens_per_s / rated.tokens_per_s
    values = {
        "rate_ratio": ratio, "least_rate_ratio": least, "tokens_per_s": many.tokens_per_s,
        "rated_tokens_per_s": rated.tokens_per_s, "n_passes": many.n_passes,
    }  # fmt: skip
    detail = (
        f"{ratio:.3f} of one long prompt's tokens a second (at least {least}): {many.tokens_per_s:.0f} of "
        f"{rated.tokens_per_s:.0f}, in {many.n_passes} passes"
    )
    return Verdict(ratio >= least, detail, values)


def judge_bits(differing: dict[str, int], n_values: int, n_sizes: int) -> Verdict:
    """Whether keys and values are the same bit for bit in passes of every size, alone and beside others."""
    values = {"n_values": n_values, "n_sizes": n_sizes, "n_differing": sum(differing.values())}
    where = "; ".join(f"{what}: {n} differ" for what, n in differing.items()) or "0 differ"
    return Verdict(not differing, f"{n_values} keys and values in passes of {n_sizes} sizes, {where}", values)
