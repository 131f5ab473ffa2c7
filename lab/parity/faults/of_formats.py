"""Bugs in how a target's maps of fewer bits are read: with scales of another row, block, expert or group.

All are in the first layer, whose attention or feed-forward must then be named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from eagle3core.kernels.experts import VALUE_BYTES, Matrices, Mxfp4Matrices, OrderedMatrices
from eagle3core.weights import PackedExperts, PackedTarget
from lab.parity.faults.fault import Fault
from lab.parity.faults.of_experts import of_experts

_BLOCKS = 2  # the axis of blocks of k in scales of all experts, in the kernels' order or not


def _rolled_o_scales(target: PackedTarget) -> PackedTarget:
    first = target.layers[0]
    if first.o.scales is None:
        return target
    spoiled = replace(first, o=replace(first.o, scales=first.o.scales.roll(1, dims=0)))
    return replace(target, layers=(spoiled, *target.layers[1:]))


def _in_down(change: Callable[[Matrices], Matrices]) -> Callable[[PackedTarget], PackedTarget]:
    def changed(experts: PackedExperts) -> PackedExperts:
        return replace(experts, down=change(experts.down))

    return of_experts(changed)


def _of_another_expert(maps: Matrices) -> Matrices:
    if maps.scales is None:
        return maps
    return replace(maps, scales=maps.scales.roll(1, dims=0))


def _of_another_block(maps: Matrices) -> Matrices:
    if maps.scales is None or maps.scales.ndim <= _BLOCKS:
        return maps
    return replace(maps, scales=maps.scales.roll(1, dims=_BLOCKS))


def _of_another_group(maps: Matrices) -> Matrices:
    if isinstance(maps, Mxfp4Matrices):
        return replace(maps, scales=maps.scales.roll(1, dims=-1))
    if not isinstance(maps, OrderedMatrices) or maps.form != "mxfp4":
        return maps
    values, powers = maps.data[..., :VALUE_BYTES], maps.data[..., VALUE_BYTES:]
    return replace(maps, data=torch.cat([values, powers.roll(1, dims=-2)], dim=-1))


FORMAT_FAULTS = (
    Fault(
        "rolled_scales", "the first layer's o map has the scales of the rows before", "target.0.attn", "prefill",
        needs="a target in FP8", target=_rolled_o_scales,
    ),
    Fault(
        "rolled_expert_scales", "the first layer's down maps have the scales of the expert before", "target.0.mlp",
        "prefill", needs="a target with experts in FP8", target=_in_down(_of_another_expert),
    ),
    Fault(
        "rolled_block_scales", "the first layer's down maps have the scales of the block before", "target.0.mlp",
        "prefill", needs="a target with experts in FP8 by block", target=_in_down(_of_another_block),
    ),
    Fault(
        "rolled_group_scales", "the first layer's down maps have the scales of the group of 32 before",
        "target.0.mlp", "prefill", needs="a target with experts in MXFP4", target=_in_down(_of_another_group),
    ),
)  # fmt: skip
