"""Rows of a bench at 32K tokens as an H200 gave them, to judge by the packaged gates, with any value changed."""

from __future__ import annotations

from typing import Any

from places import DATA

from lab.rows.gates import GateResult
from lab.rows.store import Row

SMALL = DATA / "small_gates.toml"
COUNTS = {
    "n_wrong_requests": 0, "invariants.gemm_fallbacks": 0, "invariants.untuned_products": 0, "invariants.faults": 0,
    "invariants.guessed_layouts": 0, "invariants.debug_switches": 0,
}  # fmt: skip
PARAMETERS = {
    "geometry": "llama-3.1-8b", "pair": "planted", "context": 32768, "batch": 1, "dtype": "bfloat16", "tokens": 256,
}  # fmt: skip
# What an H200 gave at 32K tokens; what is not here no gate of single32k reads.
BASE: dict[str, Any] = {
    "step_ms_median": 4.514, "floor_ms": 4.2205, "share_of_floor": 0.935, "ceiling_gb_per_s": 4578.0,
    "decode_tokens_per_s": 221.5, "over_plain-torch": 0.708, "over_hf-static": 0.6, "stage_ms.target.attn": 2.1416,
    "stage_ms.target.mlp": 3.0059, "stage_ms.target.head": 0.2444, "stage_ms.between spans": 2.87,
    "throughput_tokens_per_sec.mean": 221.5, "scenario.micro_run": True, **COUNTS,
}  # fmt: skip
SPEC: dict[str, Any] = {
    "step_ms_median": 5.267, "floor_ms": 4.8215, "share_of_floor": 0.9153, "ceiling_gb_per_s": 4578.0,
    "decode_tokens_per_s": 570.0, "step_over_base": 1.167, "step_over_base_bound": 1.1424, "speedup": 2.571,
    "speedup_at_dial": 2.57, "acceptance_length": 3.0003, "planned_acceptance_length": 3.0003,
    "over_plain-torch": 0.66, "speedup_over_plain-torch": 3.63, "speedup_over_hf-static": 3.9, "n_steps": 515,
    "n_divergent": 0, "invariants.single_token_steps": 0, "stage_ms.draft.fc": 0.038, "stage_ms.target.attn": 2.163,
    "stage_ms.target.mlp": 3.04, "throughput_tokens_per_sec.mean": 569.5, "scenario.micro_run": True, **COUNTS,
}  # fmt: skip


def row(name: str, values: dict[str, Any] | None, k: int, reason: str | None = None) -> Row:
    return Row(
        run="gates", job="bench", notebook="bench", kind="bench", name=name, values=values or {},
        parameters={**PARAMETERS, "spec_k": k}, status="missing" if reason else "measured", reason=reason,
        environment="here", recorded_at="now",
    )  # fmt: skip


def rows(base: dict[str, Any] | None = None, spec: dict[str, Any] | None = None) -> list[Row]:
    """Both engines' rows at 32K, some values changed; None takes a value away."""
    changed = [{**values, **(more or {})} for values, more in ((BASE, base), (SPEC, spec))]
    plain, ours = ({name: value for name, value in values.items() if value is not None} for values in changed)
    return [row("Baseline_Single_Context32K", plain, 0), row("Speculative_Single_Context32K_3tokens", ours, 3)]


def by_name(results: list[GateResult], part: str) -> GateResult:
    [found] = [result for result in results if part in result.name]
    return found
