"""Bugs to plant, one for every stage, to see that parity finds each one where it is.

A check that has never failed is a hope. `planted(name)` replaces one piece of the engine, in this process only, by a
version with a known bug; `FAULTS` says at which stage and in which pass it must be named. Most are bugs that EAGLE code
bases have really had, and that verification hides: the output stays right and only the acceptance length falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3core.decode import expand as expand_module
from eagle3core.decode import step as step_module
from eagle3core.decode.state import DecodeState
from eagle3core.kernels.layer import rms_norm_reference
from eagle3core.model.block import KVRows, Linear, Pass
from eagle3core.model.draft import DraftModel
from eagle3core.model.target import TargetModel
from eagle3core.trace import Trace
from lab.errors import ExperimentError

Method = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """One bug.

    Attributes:
        name: how it is asked for.
        what: the bug, in words.
        stage, kind: the stage and kind of pass (`lab.parity.recording.kind_of`) at which parity must name it.
        owner, attribute: what it replaces.
        make: the buggy version, given the right one.
        needs: what a run must have for the bug to change anything; empty when every run shows it.
    """

    name: str
    what: str
    stage: str
    kind: str
    owner: Any
    attribute: str
    make: Callable[[Method], Method]
    needs: str = ""


FAULTS: dict[str, Fault] = {}


@contextmanager
def planted(name: str) -> Iterator[Fault]:
    """The engine with the bug `name` in it, for the enclosed block.

    Raises:
        ExperimentError: no such bug.
    """
    if name not in FAULTS:
        known = ", ".join(sorted(FAULTS))
        raise ExperimentError(f"fault is {name!r}", f"one of {known}", "name one, or leave it empty")
    fault = FAULTS[name]
    with _replaced(fault.owner, fault.attribute, fault.make(getattr(fault.owner, fault.attribute))):
        yield fault


@contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """`owner.attribute` as `value` for the enclosed block; an instance then shadows its class."""
    was_own, before = attribute in vars(owner), getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)


def _bug(
    name: str, at: tuple[str, str], what: str, replaces: tuple[Any, str], needs: str = ""
) -> Callable[[Callable[[Method], Method]], Callable[[Method], Method]]:
    """Enter the decorated maker of a buggy method under `name`; `at` is (stage, kind of pass)."""

    def enter(make: Callable[[Method], Method]) -> Callable[[Method], Method]:
        FAULTS[name] = Fault(name, what, *at, *replaces, make, needs)
        return make

    return enter


def _spoils(
    name: str, at: tuple[str, str], what: str, model: type[TargetModel] | type[DraftModel]
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Enter the decorated change of a finished model as a bug of its constructor."""

    def enter(change: Callable[[Any], None]) -> Callable[[Any], None]:
        @_bug(name, at, what, (model, "__init__"))
        def make(right: Method) -> Method:
            def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
                right(self, *args, **kwargs)
                change(self)

            return wrong

        return change

    return enter


# The target.


@_spoils("shifted_embedding", ("target.embed", "prefill"), "the token table is one row off", TargetModel)
def _shift_embedding(target: TargetModel) -> None:
    target.embedding = target.embedding.roll(1, dims=0)


@_spoils("wrong_rms_eps", ("target.0.attn", "prefill"), "RMSNorm uses an epsilon of 0.1", TargetModel)
def _large_eps(target: TargetModel) -> None:
    target.geometry = replace(target.geometry, block=replace(target.geometry.block, rms_norm_eps=0.1))


@_spoils("swapped_gate_up", ("target.0.mlp", "prefill"), "gate and up of the first layer are swapped", TargetModel)
def _swap_gate_and_up(target: TargetModel) -> None:
    block = target.blocks[0]
    block.gate, block.up = block.up, block.gate


@_bug("wrong_tap", ("target.taps", "prefill"), "the last tap is one layer off", (TargetModel, "forward"))
def _neighbouring_tap(right: Method) -> Method:
    def wrong(self: TargetModel, *args: Any, **kwargs: Any) -> Any:
        if not self.taps:  # a plain engine captures nothing
            return right(self, *args, **kwargs)
        last = self.taps[-1]
        moved = last + 1 if last < self.geometry.n_layers else last - 1
        with _replaced(self, "taps", (*self.taps[:-1], moved)):
            return right(self, *args, **kwargs)

    return wrong


@_spoils("rolled_target_head", ("target.head", "prefill"), "the head's rows are one token off", TargetModel)
def _roll_head(target: TargetModel) -> None:
    target.head = Linear(target.head.weight.roll(1, dims=0), target.head.bias)


@_spoils("scaled_draft_norm", ("draft.norm", "extend"), "the final norm has the wrong gain", DraftModel)
@_spoils("scaled_target_norm", ("target.norm", "prefill"), "the final norm has the wrong gain", TargetModel)
def _scale_final_norm(model: TargetModel | DraftModel) -> None:
    model.final_norm = model.final_norm * 1.25


@_bug("second_best", ("accept.tokens", "step"), "the second choice is taken", (step_module, "argmax_reference"))
def _second_best(right: Method) -> Method:
    return lambda logits: right(logits.scatter(-1, right(logits)[..., None], float("-inf")))


# The draft, in the order of its stages.


@_bug("unshifted_tokens", ("draft.tokens", "prefill"), "entries have the wrong token", (DraftModel, "extend"))
def _tokens_not_shifted(right: Method) -> Method:
    return lambda self, taps, tokens, *rest: right(self, taps, tokens.roll(1, dims=1), *rest)


@_bug("shifted_features", ("draft.taps", "prefill"), "entries have another row's features", (DraftModel, "extend"))
def _features_one_late(right: Method) -> Method:
    return lambda self, taps, *rest: right(self, taps.roll(1, dims=1), *rest)


@_bug("tap_order", ("draft.fc", "prefill"), "the taps reach fc in the wrong order", (DraftModel, "fuse"))
def _taps_in_wrong_order(right: Method) -> Method:
    return lambda self, taps: right(self, taps.roll(self.geometry.target_hidden_size, dims=-1))


@_bug("swapped_concat", ("draft.concat", "prefill"), "hidden state first, embedding second", (DraftModel, "concat"))
def _swap_halves(right: Method) -> Method:
    def wrong(*args: Any) -> Tensor:
        embedded, hidden = right(*args).chunk(2, dim=-1)
        return torch.cat([hidden, embedded], dim=-1)

    return wrong


@_bug("swapped_kv", ("draft.qkv", "prefill"), "keys and values are swapped", (DraftModel, "qkv"))
def _swap_keys_and_values(right: Method) -> Method:
    def wrong(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = right(*args)
        return q, v, k

    return wrong


@_bug(
    "rope_query_off_by_one",
    ("draft.rope", "chain1"),
    "chained steps rotate their query one position too far; extend passes, which share `rotate`, stay right",
    (DraftModel, "chain"),
    needs="k >= 2",
)
def _query_one_ahead(right: Method) -> Method:
    def wrong(self: DraftModel, *args: Any) -> Any:
        rotate = self.rotate

        def off_by_one(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            return rotate(q, k, positions + 1)[0], rotate(q, k, positions)[1]

        with _replaced(self, "rotate", off_by_one):
            return right(self, *args)

    return wrong


@_bug("hot_attention", ("draft.attn", "prefill"), "scores are scaled by 1.5", (DraftModel, "attend"))
def _hotter_attention(right: Method) -> Method:
    return lambda self, q, *rest: right(self, q * 1.5, *rest)


class _StaleRows:
    """A cache view that leaves the entries of accepted tokens as the chained steps wrote them."""

    def __init__(self, view: KVRows, n_chained: int) -> None:
        self.view, self.n_chained = view, n_chained
        self.block_tables = view.block_tables

    def write(self, layer: int, starts: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> None:
        row = torch.arange(valid.shape[1], device=valid.device)
        is_stale = (row < valid.sum(dim=1, keepdim=True) - 1) & (row < self.n_chained)
        self.view.write(layer, starts, k, v, valid & ~is_stale)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.view.blocks(layer)


@_bug(
    "stale_draft_kv",
    ("draft.attn", "after acceptance"),
    "entries of accepted tokens keep the chained steps' keys and values",
    (expand_module, "extend_pending"),
    needs="accepted drafts, and k >= 2",
)
def _stale_entries(right: Method) -> Method:
    def wrong(draft: DraftModel, state: DecodeState, slots: Tensor, trace: Trace) -> Any:
        extend, n_chained = draft.extend, state.tree.max_depth - 1  # of k drafts, k - 1 left an entry behind

        def stale(taps: Tensor, tokens: Tensor, at: Pass, view: KVRows, *rest: Any) -> Any:
            return extend(taps, tokens, at, _StaleRows(view, n_chained), *rest)

        with _replaced(draft, "extend", stale):
            return right(draft, state, slots, trace)

    return wrong


@_bug("unnormed_mlp", ("draft.mlp", "prefill"), "the feed-forward reads the un-normed residual", (DraftModel, "mlp"))
def _unnormed_mlp(_right: Method) -> Method:
    return lambda self, residual: self.block.mlp(residual)


@_bug("normed_feedback", ("draft.feedback", "prefill"), "the state fed back is normed", (DraftModel, "feed_back"))
def _normed_feedback(right: Method) -> Method:
    def wrong(self: DraftModel, output: Tensor) -> Tensor:
        return rms_norm_reference(right(self, output), self.final_norm, self.geometry.block.rms_norm_eps)

    return wrong


@_bug("rolled_draft_head", ("draft.head", "extend"), "the logits are one id off", (DraftModel, "head"))
def _roll_logits(right: Method) -> Method:
    return lambda *args: right(*args).roll(1, dims=-1)


@_bug(
    "missing_d2t",
    ("draft.tokens", "chain1"),
    "draft ids are used as target ids",
    (DraftModel, "to_target_ids"),
    needs="a draft vocabulary smaller than the target's, and k >= 2",
)
def _unmapped_ids(_right: Method) -> Method:
    return lambda self, draft_ids: draft_ids
