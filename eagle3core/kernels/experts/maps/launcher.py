"""The experts' two maps, a launch of `walk` each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels.card import (
    DTYPES,
    PLAIN_TORCH,
    SHARED_BYTES,
    Launch,
    Parameter,
    Variant,
    overlaps,
    parameters,
)
from eagle3core.kernels.experts.maps.form import THREADS, Form, form_for, piece_units
from eagle3core.kernels.experts.maps.order import TILE, UNIT
from eagle3core.kernels.experts.maps.walk import make_walk
from eagle3core.kernels.experts.matrices import Matrices, OrderedMatrices
from eagle3core.kernels.experts.routing.lists import Lists, Routed
from eagle3core.kernels.experts.routing.lone import Choice, choice_of
from eagle3core.kernels.experts.seats import seated, seats_for

_REGISTERS_SM, _MOST_REGISTERS = 65536, 255  # of a multiprocessor; of a thread, to whom they are given by eights
_SEATED = 3  # tiles a block from which on blocks take seats: fewer are over before who has none has found one


def walk_parameters(early: bool) -> tuple[Parameter, ...]:
    """The kernel's parameters.

    x `[rows, k]`, w, bias and scales (fp32, of e4m3) of `OrderedMatrices`, norms `[n]` fp32; groups and places
    of `Lists`, or a row's logits to choose by, and where choice and shares are left; seats and processors of
    `seats.seats_for`; units of k, tiles of an expert's matrix, chosen: places of one row of x, width of y. `early`: the
    lists, or logits, were written before the kernel before this one began.
    """
    role = "const" if early else "in"
    return parameters(
        f"x:in w:const bias:const scales:const norms:in given:{role} places:{role} logits:{role} ids:out "
        "shares:out y:out seats:counter units:i32 tiles:i32 chosen:i32 width:i32 processors:i32"
    )


def walk_variant(
    arch: str, dtype: str, form: str, k: int, gate: str, has_bias: bool, cut: Form, choice: Choice | None = None
) -> Variant:
    """The compiled form of one map; of down, which has no gate, begun before gate and up have ended.

    Raises:
        KernelLimit: more shared memory than a block may have.
    """
    shared = cut.shared_bytes_on(arch, form)
    if shared > SHARED_BYTES[arch]:
        raise KernelLimit(f"{cut} takes {shared} bytes", f"{SHARED_BYTES[arch]} on {arch}", PLAIN_TORCH)
    resident = cut.resident_on(arch, form)
    gated, chosen = f"_{gate}" if gate else "", choice.name if choice else ""
    return Variant(
        name=f"expert_map_{dtype}_{form}_k{piece_units(k, form)}{gated}{'_b' if has_bias else ''}{chosen}_{cut.name}",
        make=make_walk,
        constants={
            "dtype": dtype, "form": form, "gate": gate, "has_bias": has_bias, "piece": piece_units(k, form),
            "x_tiles": cut.x_tiles, "w_tiles": cut.w_tiles, "step": cut.step, "stage_steps": cut.stage_steps,
            "stages": cut.stages, "first": (gate and cut.first) or cut.stages, "buffers": cut.buffers,
            "early": not gate, "overlap": overlaps(arch), "choice": choice,
        },
        parameters=walk_parameters(early=not gate), threads=THREADS, shared_bytes=shared, blocks_per_sm=resident,
        max_registers=min(_MOST_REGISTERS, _REGISTERS_SM // (THREADS * resident) // 8 * 8),
        instructions={"HMMA": 4 * cut.x_tiles * cut.w_tiles * cut.step, "UBLKCP" if overlaps(arch) else "LDGSTS": 1},
        dependent=overlaps(arch), rounds_itself=True,
    )  # fmt: skip


def expert_gate_up(
    arch: str, x: Tensor, sums: Tensor, routed: Routed, maps: Matrices, inner: Tensor, *, eps: float, gate: str,
    is_normalised: bool, lists: Lists | None = None, setting: Mapping[str, Any] | None = None,
) -> list[Launch]:  # fmt: skip
    """What `feed.expert_gate_up_meaning` says; 1 / rms of the rows is read of `lists`.

    Of one row it chooses the experts as well (`routing.lone`), by the logits, and leaves choice and shares.
    `setting`: neutral parameters in place of the chosen ones: fields of `form.Cut`, and "blocks".

    Raises:
        KernelLimit: see `_launch`.
    """
    n_chosen = routed.chosen.shape[1]
    return [_launch(arch, x, n_chosen, routed, maps, inner, gate, lists, setting or {}, is_normalised)]


def expert_down(
    arch: str, inner: Tensor, routed: Routed, maps: Matrices, parts: Tensor, *, is_normalised: bool,
    lists: Lists | None = None, setting: Mapping[str, Any] | None = None,
) -> list[Launch]:  # fmt: skip
    """What `feed.expert_down_meaning` says, right behind `expert_gate_up`, which has waited for logits and lists.

    Raises:
        KernelLimit: see `_launch`.
    """
    return [_launch(arch, inner, 1, routed, maps, parts, "", lists, setting or {}, is_normalised)]


def _launch(
    arch: str, x: Tensor, chosen: int, routed: Routed, maps: Matrices, y: Tensor, gate: str, lists: Lists | None,
    setting: Mapping[str, Any], is_normalised: bool,
) -> Launch:  # fmt: skip
    """One map.

    Raises:
        KernelLimit: matrices not in the kernels' order, rows other than 16-bit ones, no lists, or as `walk_variant`.
    """
    if not isinstance(maps, OrderedMatrices) or x.dtype not in DTYPES or lists is None:
        raise KernelLimit(
            f"rows are {x.dtype}, experts {type(maps).__name__}, {'no lists' if lists is None else 'with lists'}",
            "bf16 or fp16, OrderedMatrices, lists", PLAIN_TORCH,
        )  # fmt: skip
    if maps.form == "mxfp4" and x.dtype != torch.bfloat16:
        raise KernelLimit(f"experts in MXFP4 and rows in {x.dtype}", "bf16, which holds all their values", PLAIN_TORCH)
    n_experts, tiles, units = maps.data.shape[:3]
    own = {name: value for name, value in setting.items() if name not in ("x_tiles", "processors")}  # of the lists
    blocks = own.pop("blocks", None)
    has_bias = maps.bias is not None
    (rows, n_chosen), choice = routed.chosen.shape, choice_of(routed, is_normalised)
    cut = form_for(maps.form, units * UNIT, lists.group_rows // 8, own, is_lone=choice is not None)
    variant = walk_variant(arch, DTYPES[x.dtype], maps.form, units * UNIT, gate, has_bias, cut, choice)
    if tiles % cut.w_tiles:
        raise KernelLimit(f"{cut.w_tiles} tiles of {tiles} at once", "a divisor", "pass no setting")
    n_groups = min(rows * n_chosen, n_experts + rows * n_chosen // lists.group_rows)
    most = n_groups * (tiles // cut.w_tiles)
    grid = min(blocks or seated(lists.seats) * variant.blocks_per_sm, most)
    if most * grid >= 1 << 31:
        raise KernelLimit(f"{most} tiles for {grid} blocks", "a product below 2^31", "a smaller prefill_chunk")
    by: dict[str, Any] = dict.fromkeys(("given", "places", "logits", "ids", "shares"))
    if choice is None:
        by |= {"given": lists.groups, "places": lists.places}
    else:
        by |= {"logits": routed.logits} | ({"ids": routed.chosen, "shares": routed.shares} if gate else {})
    seats, processors = seats_for(lists.seats, grid) if most >= _SEATED * grid else (None, 0)
    return variant.launch(
        (grid,), x=x, w=maps.data, bias=maps.bias, scales=maps.scales, norms=lists.norms, **by, y=y, seats=seats,
        units=units, tiles=tiles, chosen=chosen, width=tiles * TILE // (2 if gate else 1), processors=processors,
    )  # fmt: skip


def walk_bytes(values: Mapping[str, Any]) -> int:
    """Bytes of a launch with these operands, where its rows choose any experts alike: those of distinct ones once."""
    (n, k), n_experts = values["y"].shape[:2], len(values["w"])
    share: float = 1.0 - (1.0 - k / n_experts) ** n
    matrices = sum(int(values[name].nbytes) for name in ("w", "bias", "scales") if values[name] is not None)
    places = 4 * int(n) * int(k)
    return round(share * matrices) + sum(int(values[name].nbytes) for name in ("x", "y")) + places
