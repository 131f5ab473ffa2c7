"""Bugs in the experts of a target: of the router, of the choice, of the shares, and of the experts themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from eagle3core.kernels import Call
from eagle3core.weights import PackedExperts, PackedTarget
from lab.parity.faults.fault import Fault, Place, after
from lab.parity.faults.of_target import with_first_mlp

EXPERTS = "a target with experts in its first layer"


def of_experts(change: Callable[[PackedExperts], PackedExperts]) -> Callable[[PackedTarget], PackedTarget]:
    """The target with other experts in its first layer, if it has any there."""

    def changed(target: PackedTarget) -> PackedTarget:
        mlp = target.layers[0].mlp
        return with_first_mlp(target, change(mlp)) if isinstance(mlp, PackedExperts) else target

    return changed


def _rolled_router(experts: PackedExperts) -> PackedExperts:
    return replace(experts, router=experts.router.roll(1, dims=0))


def _rolled_experts(experts: PackedExperts) -> PackedExperts:
    return replace(experts, down=experts.down.rolled())


def _smallest_experts(at: Place, call: Call) -> Sequence[Call]:
    """The router's logits as they are, and a row's last expert in the place of its best."""
    if call.op != "route":
        return [call]
    routed = call.operands["out"]

    def choose() -> None:
        n = routed.chosen.shape[1]
        order = routed.logits.sort(dim=1, descending=True).indices
        routed.chosen.copy_(torch.cat([order[:, 1:n], order[:, -1:]], dim=1).sort(dim=1).values)

    return after(call, choose)


def _even_shares(at: Place, call: Call) -> Sequence[Call]:
    if call.op != "route":
        return [call]
    shares = call.operands["out"].shares
    return after(call, lambda: shares.fill_(1.0 / shares.shape[1]))


EXPERT_FAULTS = (
    Fault(
        "rolled_router", "the router's rows are one expert off in the first layer", "target.0.router", "prefill",
        needs=EXPERTS, target=of_experts(_rolled_router),
    ),
    Fault(
        "rolled_experts", "the first layer's down maps are one expert off", "target.0.mlp", "prefill", needs=EXPERTS,
        target=of_experts(_rolled_experts),
    ),
    Fault(
        "smallest_experts", "rows go to their least expert in the place of the best", "target.0.experts", "prefill",
        needs=EXPERTS, change=_smallest_experts,
    ),
    Fault(
        "even_shares", "every chosen expert has the same share", "target.0.mlp", "prefill", needs=EXPERTS,
        change=_even_shares,
    ),
)  # fmt: skip
