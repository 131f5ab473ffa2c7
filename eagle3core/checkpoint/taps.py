"""Which of the target's residual streams a head reads: ids and their convention, decided by evidence.

The same ids mean other tensors to other readers, so what is not settled by the files is said, with the reading that was
not taken (docs/checkpoints.md). Sources: the readers' own code, vllm-project/vllm, sgl-project/sglang,
vllm-project/speculators, sgl-project/SpecForge, NVIDIA/TensorRT-Model-Optimizer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from eagle3core.checkpoint.keys import INNER, is_speculators
from eagle3core.checkpoint.settings import Settings
from eagle3core.errors import CheckpointError
from eagle3core.geometry import Decision, TargetGeometry

TAP_KEY = "eagle_aux_hidden_state_layer_ids"
CONVENTION_KEY = "eagle_aux_hidden_state_layer_convention"
CONVENTIONS = ("input", "output")
USUAL = 3  # taps, where nothing is said


@dataclass(frozen=True)
class Named:
    """Ids that somebody named.

    Attributes:
        ids: as written. convention: "input" or "output"; anything else is refused.
        source: where they were written. evidence: why that convention.
        is_settled: whether nothing speaks for the other.
    """

    ids: tuple[int, ...]
    convention: str | None
    source: str
    evidence: str
    is_settled: bool = True

    @property
    def inputs(self) -> tuple[int, ...]:
        """The ids in input numbering."""
        return tuple(i + (self.convention == "output") for i in self.ids)

    @property
    def decision(self) -> Decision:
        """The choice in words."""
        other = "output" if self.convention == "input" else "input"
        return Decision(
            "taps",
            f"inputs of layers {list(self.inputs)}, {list(self.ids)} in {self.convention!r} numbering",
            self.evidence,
            "" if self.is_settled else f"{other!r} numbering (see capture_layers and capture_convention)",
        )


def resolve_taps(
    config: Settings,
    target: TargetGeometry,
    capture_layers: tuple[int, ...] | None = None,
    capture_convention: str | None = None,
) -> tuple[tuple[int, ...], Decision]:
    """Tap ids in "input" numbering: id i is the residual stream that layer i reads, id n what the last layer writes.

    The engine's own setting wins, then the ids of the draft's config, then (2, n // 2, n - 3).

    Raises:
        CheckpointError: ids outside 0..n, not ascending and distinct, another number of them than the config says,
            given in only one of two parts, or a target too shallow for the defaults.
    """
    n = target.n_layers
    if capture_layers is not None:
        source = "SpeculativeConfig.capture_layers"
        named = Named(tuple(capture_layers), capture_convention, source, "capture_layers and its convention say so")
    else:
        named = _stated(config, target) or _usual(config, target)
    if named.convention not in CONVENTIONS:
        raise CheckpointError(
            f"{named.source} are {list(named.ids)} with convention {named.convention!r}",
            "'input' (id i is what layer i reads) or 'output' (what layer i writes)",
            f"state capture_convention, or {CONVENTION_KEY} in the draft's config.json",
        )
    taps = named.inputs
    if any(not 0 <= i <= n for i in taps) or any(a >= b for a, b in itertools.pairwise(taps)):
        low, high = (-1, n - 1) if named.convention == "output" else (0, n)
        raise CheckpointError(
            f"{named.source} are {list(named.ids)} ({named.convention!r} numbering) on a target of {n} layers",
            f"distinct ascending ids from {low} to {high}; the defaults need at least 7 layers",
            "give SpeculativeConfig(capture_layers=..., capture_convention=...) the taps the head was trained with",
        )
    return taps, named.decision


def _stated(config: Settings, target: TargetGeometry) -> Named | None:
    """The ids that a draft's config names; None when it names none.

    Raises:
        CheckpointError: two lists that name different layers, or as many ids as `num_aux_hidden_states` does not say.
    """
    inner = config.nested(INNER)
    written = config.text(CONVENTION_KEY) or (inner.text(CONVENTION_KEY) if inner is not None else "")
    lists: list[Named] = []
    for place, is_inner in ((config, False), (inner, True)):
        ids = place.ids(TAP_KEY) if place is not None else ()
        if place is not None and ids:  # ModelOpt writes an empty list where it means none
            lists.append(_read(ids, f"{place.source}: {TAP_KEY}", written, is_inner, is_speculators(config), target))
    if len({named.inputs for named in lists}) > 1:
        first, second = lists
        raise CheckpointError(
            f"{config.source}: tap ids {list(first.ids)} ({first.convention!r} numbering) and, in eagle_config, "
            f"{list(second.ids)} ({second.convention!r} numbering) name different layers",
            "one list, or two that mean the same layers",
            f"remove the wrong one, or add {CONVENTION_KEY}",
        )
    for named in lists[:1]:
        count = config.count("num_aux_hidden_states", len(named.ids))
        if count != len(named.ids):
            raise config.bad("num_aux_hidden_states", count, f"{len(named.ids)}, as many as {TAP_KEY} names")
    return lists[0] if lists else None


def _read(
    ids: tuple[int, ...], source: str, written: str, is_inner: bool, nested: bool, target: TargetGeometry
) -> Named:
    """Ids with the convention that the evidence gives them, the strongest first."""
    n = target.n_layers

    def named(convention: str, evidence: str, is_settled: bool = True) -> Named:
        return Named(ids, convention, source, evidence, is_settled)

    if written:
        return named(written, f"{CONVENTION_KEY} says so")
    if nested and not is_inner:
        return named("input", "speculators numbers inputs")
    if n in ids:
        return named("input", f"id {n} is no layer of {n}, but what leaves the last one")
    if -1 in ids:
        return named("output", "id -1 is no input, but what enters layer 0")
    if ids[0] == 1:
        return named("output", "lists that begin with 1 are trainers' lists of outputs")
    if ids[0] == 2 or ids == target.default_taps:
        return named("input", "lists that begin with 2, and the usual list of inputs, number inputs")
    if is_inner:
        return named("output", "SpecForge and ModelOpt write outputs in eagle_config", is_settled=False)
    return named("input", "ids at the top of a file are read as inputs", is_settled=False)


def _usual(config: Settings, target: TargetGeometry) -> Named:
    count = config.count("num_aux_hidden_states", USUAL)
    if count != USUAL:
        raise config.bad(
            "num_aux_hidden_states", count, f"{USUAL} where {TAP_KEY} names none",
            "give SpeculativeConfig(capture_layers=..., capture_convention=...) the taps the head was trained with",
        )  # fmt: skip
    n = target.n_layers
    return Named(target.default_taps, "input", f"the default taps of {n} layers", "the files name none: the usual ones")
