"""Launches computed by plain torch in double precision: what a program means, without its kernels.

The emulator runs the kernels themselves, a minute for a few steps; this runs the same programs over the same tensors in
milliseconds, each launch by its card's reference. So schedules, slots and stops are tested over many steps here, and
that kernels do what their launches mean is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.attention.launcher import paged_attention_reference
from eagle3core.kernels.card import Launch
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.layer.draft_input import draft_input_reference
from eagle3core.kernels.layer.embedding import embedding_reference, partial_squares_reference
from eagle3core.kernels.slots.active_slots import active_slots_reference
from eagle3core.kernels.slots.admit import Admitted, admit_reference
from eagle3core.kernels.slots.commit import Committed, Decided, commit_reference
from eagle3core.kernels.slots.compact_kv import compact_kv_reference
from eagle3core.kernels.slots.open_chunk import open_chunk_reference
from eagle3core.kernels.slots.open_step import OpenSlots, open_step_reference
from eagle3core.kernels.tree.accept import accept_reference
from eagle3core.kernels.tree.mask_words import unpack_words

Values = dict[str, Any]
_attended: dict[int, Tensor] = {}
_packed: dict[int, Tensor] = {}  # x by the address where its packed form would lie


def execute(launches: Sequence[Launch]) -> None:
    """The launches one after the other, on CPU tensors."""
    for launch in launches:
        names = [parameter.name for parameter in launch.variant.parameters]
        values = dict(zip(names, launch.values, strict=True))
        name = launch.variant.make.__name__.removeprefix("make_")
        _ACTS["gemm" if name.startswith("gemm_") else name](values, launch)


def unpacked(w: Tensor, epilogue: Epilogue, n_w: int, k: int) -> Tensor:
    """The inverse of `pack_weight`."""
    units = w.shape[1] // 32
    if epilogue.kind == "swiglu":
        rows = w.view(n_w // 16, units, 2, 8, 32).permute(2, 0, 3, 1, 4)
    elif epilogue.kind == "qkv":
        d = epilogue.head_dim
        rows = w.view(n_w // d, d // 16, units, 2, 8, 32).permute(0, 3, 1, 4, 2, 5)
    else:
        rows = w.view(n_w // 16, units, 2, 8, 32).permute(0, 2, 3, 1, 4)
    return rows.reshape(n_w, units * 32)[:, :k]


def _pack_rows(v: Values, launch: Launch) -> None:
    _packed[v["packed"].data_ptr()] = v["x"].clone()


def _gemm(v: Values, launch: Launch) -> None:
    epilogue, n_w = launch.variant.constants["epilogue"], 16 * v["tiles"]
    w = unpacked(v["w"], epilogue, n_w, v["k"]) if launch.variant.constants.get("packed", True) else v["w"]
    is_packed = launch.variant.make.__name__ == "make_gemm_group"
    x, y = _packed[v["x"].data_ptr()] if is_packed else v["x"], v["y"]
    made = x.double() @ w.double().T
    if epilogue.quads:
        mean = v["sums"][: len(x)].double().sum(1, keepdim=True) * v["inv_width"]
        made = made * torch.rsqrt(mean + v["eps"])
    if epilogue.has_bias:
        made = made + v["bias"].double()
    if epilogue.kind == "swiglu":
        gate, up = made.chunk(2, dim=1)
        made = torch.nn.functional.silu(gate) * up
    if epilogue.kind == "residual" and epilogue.has_residual:
        made = made + v["residual"].double()
    if epilogue.kind == "qkv":
        made = _rotated(made, v, epilogue)
    y.copy_(made.to(y.dtype)[:, : y.shape[1]])
    if epilogue.kind == "residual":
        v["second"].copy_((y.double() * v["gain"].double()).to(y.dtype))
        v["third"].copy_(partial_squares_reference(y))
    if epilogue.kind == "head":
        groups = y.float().view(len(y), -1, 16)
        best = groups.max(-1)
        v["second"].copy_(best.values)
        first = (groups == best.values[..., None]).int().argmax(-1)
        v["third"].copy_(first + 16 * torch.arange(groups.shape[1]))


def _rotated(made: Tensor, v: Values, epilogue: Epilogue) -> Tensor:
    d, q_heads, kv_heads = epilogue.head_dim, v["q_heads"], v["kv_heads"]
    heads = made.view(len(made), -1, d)
    cos, sin = v["table"][v["positions"].long()].double().unbind(-1)
    first, second = heads[:, : q_heads + kv_heads].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    keys, values = turned[:, q_heads:], heads[:, q_heads + kv_heads :]
    held = v["slots"] >= 0
    slot = v["slots"][held].long()
    for pages, rows in ((v["second"], keys), (v["third"], values)):
        pages[slot // epilogue.block, :, slot % epilogue.block] = rows[held].to(pages.dtype)
    return turned[:, :q_heads].flatten(1)


def _attend(v: Values, launch: Launch) -> None:
    tables, prefix = v["tables"].clamp_min(0), v["prefix"]
    masks = unpack_words(v["masks"], v["tokens"])
    q = v["q"].double()
    if bool((prefix < 0).all()):
        _attended[v["partial"].data_ptr()] = torch.zeros_like(q)
        return
    out = paged_attention_reference(q, v["k"].double(), v["v"].double(), tables, prefix.long(), masks)
    _attended[v["partial"].data_ptr()] = out


def _combine(v: Values, launch: Launch) -> None:
    v["out"].copy_(_attended[v["partial"].data_ptr()])


def _join(v: Values, launch: Launch) -> None:
    best, column = v["best"], v["column"].long()
    largest = best.max(dim=1, keepdim=True).values
    ids = torch.where(best == largest, column, 1 << 40).min(dim=1).values
    v["ids"].copy_(ids if v["draft_to_target"] is None else v["draft_to_target"][ids])


def _embed(v: Values, launch: Launch) -> None:
    ids, rows = embedding_reference(v["tokens"][: len(v["ids"])], v["table"], v["draft_to_target"])
    v["ids"].copy_(ids)
    v["h"].copy_(rows)
    if v["gain"] is not None:
        v["scaled"].copy_((rows.double() * v["gain"].double()).to(rows.dtype))
        v["sums"].copy_(partial_squares_reference(rows))


def _draft_input(v: Values, launch: Launch) -> None:
    gains = v["embed_gain"].double(), v["hidden_gain"].double()
    made = draft_input_reference(v["tokens"], v["table"].double(), v["hidden"].double(), *gains, v["eps"])
    v["x"].copy_(made)


def _take_rows(v: Values, launch: Launch) -> None:
    index, into = v["index"].long(), v["into"]
    for i in range(launch.variant.constants["sources"]):
        source, out = v[f"source{i}"], v[f"out{i}"]
        pitch = v[f"pitch{i}"] * 16 // out.element_size()
        taken = torch.where((index >= 0)[:, None], source[index.clamp_min(0)], 0)
        for row, values in zip(range(len(index)) if into is None else into.tolist(), taken, strict=True):
            if row >= 0:
                out[row * pitch : row * pitch + len(values)] = values


def _gather_rows(v: Values, launch: Launch) -> None:
    v["out"].copy_(torch.where(v["index"][:, None] >= 0, v["source"][v["index"].clamp_min(0).long()], v["fill"]))


def _active_slots(v: Values, launch: Launch) -> None:
    made = active_slots_reference(*(v[name] for name in ("occupied", "lengths", "limits", "tokens", "ends", "turn")))
    for name, value in zip(("active", "inverse", "count", "turn"), made, strict=True):
        v[name].copy_(value)


def _open_step(v: Values, launch: Launch) -> None:
    constants = launch.variant.constants
    read = OpenSlots(**{name: v["slot_tables" if name == "tables" else name] for name in OpenSlots._fields})
    made = open_step_reference(read, v["batch"], constants["levels"], constants["block"])
    for name, value in made._asdict().items():
        if constants["pending"] or not name.startswith(("entry", "last", "chain")):
            v[name].copy_(value)


def _open_chunk(v: Values, launch: Launch) -> None:
    made = open_chunk_reference(
        v["request"], v["start"], v["prompt"], v["slot_tables"], len(v["tokens"]), len(v["prefix"]),
        launch.variant.constants["block"], v["seed_row"],
    )  # fmt: skip
    for name, value in made._asdict().items():
        v[name].copy_(value)


def _accept(v: Values, launch: Launch) -> None:
    path_len = launch.variant.constants["path_len"]
    alive = v["mask"][:, 0, 0] != 0
    read = (v[name] for name in ("node_tokens", "choices", "parents", "depths"))
    for name, value in accept_reference(*read, alive, v["ends"], path_len)._asdict().items():
        v[name].copy_(value)


def _commit(v: Values, launch: Launch) -> None:
    decided = Decided(**{name: v[name] for name in Decided._fields})
    changed = Committed(**{name: v[name] for name in Committed._fields})
    for before, after in zip(changed, commit_reference(decided, changed), strict=True):
        before.copy_(after)


def _admit(v: Values, launch: Launch) -> None:
    changed = Admitted(**{name: v[name] for name in Admitted._fields})
    for before, after in zip(changed, admit_reference(v["request"], v["first"], changed, v["seed_row"]), strict=True):
        before.copy_(after)


def _compact_kv(v: Values, launch: Launch) -> None:
    read = (v[name] for name in ("block_tables", "starts", "path", "counts"))
    tables, *others = read
    for name in ("k_pages", "v_pages"):
        v[name].copy_(compact_kv_reference(v[name], tables, *others))


_ACTS: dict[str, Callable[[Values, Launch], None]] = {
    "gemm": _gemm,
    "pack_rows": _pack_rows,
    "attention_streams": _attend,
    "attention_rows": _attend,
    "attention_combine": _combine,
    "argmax_join": _join,
    "embedding": _embed,
    "draft_input": _draft_input,
    "take_rows": _take_rows,
    "gather_rows": _gather_rows,
    "active_slots": _active_slots,
    "open_step": _open_step,
    "open_chunk": _open_chunk,
    "accept": _accept,
    "commit": _commit,
    "admit": _admit,
    "compact_kv": _compact_kv,
}
