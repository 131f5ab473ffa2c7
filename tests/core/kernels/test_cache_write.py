"""Keys and values on their way into a cache of e4m3: the byte of every number, and who writes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantised_heads import e4m3_values, rounded_to_e4m3
from rings import slow_from
from torch import Tensor

from eagle3core.kernels.card import E4M3
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.meaning import gemm_meaning
from eagle3core.kernels.gemm.order.weight import pack_weight
from eagle3core.kernels.gemm.scratch import workspace
from eagle3core.kernels.gemm.tiling import Tiling
from eagle3core.kernels.layer.cache_write import make_to_e4m3, write_cache_rows
from eagle3core.kernels.layer.rope import rope, rope_meaning
from eagle3core.kernels.slots.compact_kv import compact_kv, compact_kv_meaning

CPU = torch.device("cpu")
FACTORS = torch.tensor([0.5, 4.0])  # powers of two: products with them are exact


def bytes_of(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8)


@pytest.mark.reference
def test_the_kernels_byte_of_every_kind_of_number_is_the_nearest_value() -> None:
    table = e4m3_values().float()
    between = (table[1:] + table[:-1]) / 2
    numbers = torch.cat([table, between, *(torch.nextafter(between, torch.tensor(x)) for x in (-1.0, 1e9))])
    numbers = torch.cat([numbers, torch.tensor([448.5, 464.0, 1e30, float("inf"), 1e-30, 2.0**-149])])
    numbers = torch.cat([numbers, -numbers, torch.tensor([float("nan")])])
    to_e4m3 = make_to_e4m3(emulator)
    made = torch.tensor([to_e4m3(emulator.f32(x), emulator.f32(1)) for x in numbers.tolist()], dtype=torch.uint8)
    expected = rounded_to_e4m3(numbers[:-1].double().clamp(-448, 448))
    assert torch.equal(made[:-1].view(E4M3).double(), expected)
    assert made[-1] & 0x7F == 0x7F, "no number stays none"
    pages = torch.zeros(1, 1, len(numbers), 1, dtype=E4M3)
    write_cache_rows(pages, torch.arange(len(numbers)), numbers[:, None, None], torch.tensor(1.0))
    assert torch.equal(bytes_of(pages).flatten() & 0x7F, made & 0x7F)


@pytest.mark.reference
def test_a_row_is_divided_by_its_scale_and_one_without_a_slot_is_not_kept() -> None:
    rows = torch.linspace(-3, 3, 24, dtype=torch.float64).view(3, 2, 4)
    pages = torch.zeros(2, 2, 4, 4, dtype=E4M3)
    write_cache_rows(pages, torch.tensor([5, -1, 2]), rows, torch.tensor(8.0))
    assert torch.equal(pages[1, :, 1].double(), rounded_to_e4m3(rows[0] * 8))
    assert torch.equal(pages[0, :, 2].double(), rounded_to_e4m3(rows[2] * 8))
    assert int((bytes_of(pages) != 0).any(-1).sum()) == 4


def whole_numbers(*shape: int, most: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def projection(rows: int, k: int, fp8: bool) -> dict[str, Any]:
    """q, k, v of small whole numbers, turned by quarters of a circle: every product and sum is exact."""
    turns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])[:, None].expand(-1, 16, -1).contiguous()
    epilogue = Epilogue("qkv", head_dim=32, block=16)
    weight = pack_weight(whole_numbers(5 * 32, k, most=2, seed=1), epilogue)
    slots = torch.randperm(rows + 16, generator=torch.Generator().manual_seed(2))[:rows]
    operands: dict[str, Any] = {
        "positions": torch.arange(rows).int() % 4, "slots": slots.where(torch.arange(rows) != 1, -1).int(),
        "table": turns, "factors": FACTORS,
    }  # fmt: skip
    if fp8:
        stored = pack_weight(whole_numbers(5 * 32, k, most=2, seed=1).to(E4M3), epilogue)
        weight, operands["scales"] = stored, torch.ones(5 * 32)
    return {"epilogue": epilogue, "x": whole_numbers(rows, k, most=3, seed=3), "w": weight, "k": k, "packed": True,
            "weight_rows": 5 * 32, "q_heads": 3, "kv_heads": 1, "operands": operands}  # fmt: skip


_PROJECTIONS: dict[str, tuple[int, Tiling | None, bool]] = {
    "bulk": (3, None, False),
    "group": (19, Tiling("group", 2, 4, 1, 3), False),
    "bulk over W in e4m3": (3, None, True),
    "tile": (9, Tiling("tile", 2, 2, 1, 3, warps_x=2, warps_w=1), False),
    "ring": (3, Tiling("ring", 1, 1, 1, 3), False),
}


@pytest.mark.emulated
@pytest.mark.parametrize("kernel", slow_from(2, _PROJECTIONS))
def test_every_projection_writes_the_bytes_of_its_meaning(kernel: str) -> None:
    rows, tiling, fp8 = _PROJECTIONS[kernel]
    given = projection(rows, 128, fp8)
    epilogue, operands = given.pop("epilogue"), given.pop("operands")
    made = []
    for run in ("kernel", "meaning"):
        y = torch.zeros(rows, 96, dtype=torch.bfloat16)
        pages = {name: torch.zeros(3, 1, 16, 32, dtype=E4M3) for name in ("second", "third")}
        if run == "kernel":
            scratch = workspace(CPU, 1 << 16)
            emulator.execute(
                gemm("sm_90a", epilogue, y=y, scratch=scratch, tiling=tiling, operands=operands | pages, **given)
            )
        else:
            gemm_meaning(epilogue, y=y, operands=operands | pages, **given)
        made.append((y, *map(bytes_of, pages.values())))
    assert all(torch.equal(ours, expected) for ours, expected in zip(*made, strict=True))
    assert all(len(part.unique()) > 8 for part in made[0][1:])


@pytest.mark.emulated
@pytest.mark.parametrize("normed", [False, True])
def test_the_rotation_of_normed_heads_writes_bytes(normed: bool) -> None:
    heads = whole_numbers(4, 5 * 32, most=6, seed=5)
    if normed:  # heads of plus and minus one value: their rms is that value, and the norm leaves their signs
        heads = torch.where(heads >= 0, 2.0, -2.0).to(heads.dtype)
    turns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])[:, None].expand(-1, 16, -1).contiguous()
    gains = {f"{name}_gain": 1 + whole_numbers(32, most=1, seed=6 + i) / 2 for i, name in enumerate("qk")}
    places = torch.tensor([0, 2, 1, 1]).int(), torch.tensor([7, -1, 17, 2]).int()
    made = []
    for run in (rope, rope_meaning):
        pages = [torch.zeros(2, 1, 16, 32, dtype=E4M3) for _ in "kv"]
        q = torch.zeros(4, 3, 32, dtype=heads.dtype)
        how: dict[str, Any] = {"factors": FACTORS, "eps": 0.0, **(gains if normed else {})}
        if run is rope:
            emulator.execute(rope("sm_90a", heads, *places, turns, q, *pages, **how))
        else:
            rope_meaning(heads, *places, turns, q, *pages, **how)
        made.append((q, *map(bytes_of, pages)))
    assert all(torch.equal(ours, expected) for ours, expected in zip(*made, strict=True))
    assert all(len(part.unique()) > 2 for part in made[0])


@pytest.mark.emulated
def test_an_accepted_paths_bytes_are_moved_as_they_lie() -> None:
    codes = torch.randint(0, 256, (2, 3, 2, 8, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    path = torch.tensor([[0, 2, 5], [0, 1, 3]]).int()
    where = torch.tensor([[2, 0], [1, 1]]).int(), torch.tensor([4, 1]).int(), path, torch.tensor([3, 2]).int()
    moved = []
    for run in (compact_kv, compact_kv_meaning):
        pages = [codes.clone().view(E4M3), codes.flip(0).clone().view(E4M3)]
        if run is compact_kv:
            emulator.execute(compact_kv("sm_90a", *pages, *where))
        else:
            compact_kv_meaning(*pages, *where)
        moved.append([bytes_of(each) for each in pages])
    assert all(torch.equal(ours, expected) for ours, expected in zip(*moved, strict=True))
    assert not torch.equal(moved[0][0], codes)
