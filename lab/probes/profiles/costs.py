"""Bytes that each stage of a step has to move, as the engine's cards declare them.

On the kernels' path every launch is counted by its op's own cost; in plain torch, which has no launches, the weights
and the cache that a stage reads (`lab.probes.bench.floors`). Keys are counted at the number of tokens that a sequence
has cached half-way through the profile.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor

from eagle3core import Engine
from eagle3core.kernels import Launch
from eagle3core.kernels.attention import EARLIER_BITS, attention_cost
from eagle3core.kernels.experts import walk_bytes
from eagle3core.kernels.gemm import gemm_cost
from eagle3core.kernels.layer import (
    draft_input_cost,
    embedding_cost,
    feature_input_cost,
    gather_rows_cost,
    take_rows_cost,
)
from eagle3core.kernels.tree import grow_tree_cost
from eagle3core.step import Program
from lab.probes.bench.floors import step_floor
from lab.probes.profiles.capture import class_of

BY_CARDS, BY_FLOORS = "cards", "floors"
# Tables and pages of which a launch reads a few rows, and room that it shares with others.
_NOT_WHOLE = ("k", "v", "table", "draft_to_target", "workspace", "counters")


def declared_bytes(engine: Engine, k: int, cached: float) -> tuple[dict[str, int], str]:
    """Bytes of a step by stage, layers together, and whose count they are.

    Args:
        cached: tokens a sequence has in the cache.
    """
    runner = engine.runner
    if runner.has_kernels:
        return program_bytes(runner.programs[runner.n_slots], cached), BY_CARDS
    draft = engine.draft.geometry if engine.draft is not None else None
    floor = step_floor(
        engine.target.geometry, draft, k=k, batch=runner.n_slots, cached=cached,
        itemsize=engine.target.dtype.itemsize,
        draft_weights="as_stored" if engine.draft is None else engine.draft.weights,
        cache_dtype=runner.sizes.cache_dtype, draft_cache_dtype=runner.sizes.draft_cache_dtype,
        target_weights=engine.target.weights,
    )  # fmt: skip
    return dict(floor.stages), BY_FLOORS


def program_bytes(program: Program, cached: float) -> dict[str, int]:
    """Bytes of a program by stage, layers together."""
    found: dict[str, int] = defaultdict(int)
    for stage in program:
        for launch in stage.launches:
            found[class_of(stage.name)] += launch_bytes(launch, cached)
    return dict(found)


def launch_bytes(launch: Launch, cached: float) -> int:
    """Bytes of one launch, by its op's card where operands are not simply read and written once."""
    values = launch.operands
    kind = launch.variant.make.__name__.removeprefix("make_")
    constants = launch.variant.constants
    if kind.startswith("gemm_"):
        fp8 = "blocks" if constants.get("blocks") else bool(constants.get("fp8"))
        return gemm_cost({**_gemm_case(values, constants["epilogue"]), "fp8": fp8}).bytes
    if kind.startswith("attention_") and kind != "attention_combine":
        shape, (batch, kv_heads) = constants["shape"], (len(values["prefix"]), values["k"].shape[1])
        behind = values.get("earlier", 0)  # with a window above
        return attention_cost({
            "tokens": values["tokens"], "dim": shape.dim, "heads": kv_heads * shape.group, "kv_heads": kv_heads,
            "batch": batch, "prefix": (round(cached),) * batch, "earlier": behind & ((1 << EARLIER_BITS) - 1),
            "window": values.get("window", behind >> EARLIER_BITS), "fp8": shape.is_fp8,
        }).bytes  # fmt: skip
    if kind == "attention_combine":
        return 0  # a pass of attention, whose card counts it
    if kind == "walk":
        return walk_bytes(values)
    if kind == "embedding":
        return embedding_cost(*values["h"].shape, maps=constants["maps"], scales=constants["scales"]).bytes
    if kind == "draft_input":
        return draft_input_cost(len(values["tokens"]), constants["width"], takes=constants["takes"]).bytes
    if kind == "feature_input":
        return feature_input_cost(len(values["tokens"]), constants["width"], constants["normed"]).bytes
    if kind == "take_rows":
        pieces = sum(values[f"pieces{i}"] for i in range(constants["sources"]))
        return take_rows_cost(len(values["index"]), 16 * pieces).bytes
    if kind == "grow_tree":
        batch, columns = len(values["beam_flat"]), values["logits"].shape[1]
        named = {name: constants[name] for name in ("k", "words", "maps", "fixed")}
        return grow_tree_cost(batch, level=values["level"], n_columns=columns, **named).bytes
    if kind == "gather_rows":
        return gather_rows_cost(len(values["index"]), values["out"][0].nbytes).bytes
    return sum(value.nbytes for name, value in values.items() if isinstance(value, Tensor) and name not in _NOT_WHOLE)


def _gemm_case(values: dict[str, Any], epilogue: Any) -> dict[str, Any]:
    """The case of a product's launch."""
    return {
        "kind": epilogue.kind, "m": len(values["y"]), "k": values["k"], "n": values["y"].shape[1],
        "norm": epilogue.quads > 0, "bias": epilogue.has_bias, "residual": epilogue.has_residual,
        "q_heads": values["q_heads"], "kv_heads": values["kv_heads"], "head_dim": epilogue.head_dim,
        "e4m3_cache": epilogue.e4m3_cache,
    }  # fmt: skip
