"""Blocks that have equal shares of a map's streams: the ring's bits for every cut, and what a GPU leaves to luck."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from planted_sources import rebuilt
from rings import exhaustive_but

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.card import Case, Tensors
from eagle3core.kernels.compile import compile_variant
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.candidates import gemm_candidates
from eagle3core.kernels.gemm.card import CARD, gemm_launches
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.held import kernel as held
from eagle3core.kernels.gemm.held import shares
from eagle3core.kernels.gemm.held.shares import make_shares, shared_counters, shared_sums_words
from eagle3core.kernels.gemm.launcher import gemm_variant
from eagle3core.kernels.gemm.ring import STREAMS
from eagle3core.kernels.gemm.scratch import _SUMS_BYTES, COUNTERS
from eagle3core.kernels.gemm.tiling import MULTIPROCESSORS, Tiling, deepest

ARCH, CPU = "sm_90a", torch.device("cpu")
CASE: Case = {"kind": "store", "m": 41, "n": 80, "k": 272, "dtype": "bf16", "packed": True}
SHARES: dict[str, Any] = {
    "kernel": "group", "x_tiles": 3, "w_tiles": 4, "units": 1, "stages": 5, "split": 1, "held": True, "by_stream": True,
}  # fmt: skip
RING = {"kernel": "ring", "x_tiles": 1, "w_tiles": 1, "units": 1, "stages": 3, "split": 1}
QKV: Case = {
    **CASE, "kind": "qkv", "m": 27, "q_heads": 3, "kv_heads": 1, "head_dim": 32, "block": 16, "norm": True,
}  # fmt: skip
CASES: list[tuple[Case, dict[str, Any]]] = [
    *((CASE, {"resident": n}) for n in (1, 3, 5, 7, 40)),  # sixteen streams of four tiles, none left over and some
    ({**CASE, "k": 80}, {"stages": 2, "resident": 5}),  # a stream without units
    ({**CASE, "k": 528, "m": 20, "n": 48}, {"x_tiles": 1, "units": 2, "stages": 3, "resident": 5}),
    ({**CASE, "kind": "residual", "m": 30, "n": 64, "norm": True},
     {"x_tiles": 2, "units": 2, "stages": 3, "resident": 3}),
    ({**CASE, "k": 80, "kind": "swiglu", "n": 40, "m": 25, "norm": True}, {"x_tiles": 1, "stages": 7, "resident": 7}),
]  # fmt: skip
SLOW: list[tuple[Case, dict[str, Any]]] = [
    (QKV, {"x_tiles": 1, "w_tiles": 8, "resident": 3}),
    ({**CASE, "kind": "head", "n": 96, "norm": True}, {"resident": 6, "stages": 8}),
]


def example(case: Case, device: torch.device = CPU) -> Tensors:
    return CARD.example(case, proof.generator(6, device), device)


@pytest.mark.emulated
@pytest.mark.parametrize(("case", "setting"), [*CASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)])
def test_bits_equal_those_of_the_ring_for_every_cut(case: Case, setting: dict[str, Any]) -> None:
    inputs = example(case)
    ours = proof.run(CARD, ARCH, case, inputs, emulator.execute, {**SHARES, **setting})
    theirs = proof.run(CARD, ARCH, case, inputs, emulator.execute, RING)
    assert {name: proof.differing(ours[name], theirs[name]) for name in ours} == dict.fromkeys(ours, 0)
    assert all(d.passes for d in proof.deviations(CARD, case, inputs, ours))


@pytest.mark.reference
@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
def test_shares_are_one_run_each_alike_to_a_stream_and_every_stream_has_its_owner(n: int) -> None:
    blocks, of = 10, make_shares(emulator, x_tiles=1, w_tiles=4)
    cuts = [of.of(index, n, blocks) for index in range(n)]
    assert (cuts[0][0], cuts[-1][1]) == (0, STREAMS * blocks)
    assert all(end == begin for (_, end), (begin, _) in pairwise(cuts))
    assert {end - begin for begin, end in cuts} <= {STREAMS * blocks // n, -(-STREAMS * blocks // n)}
    for index, (begin, end) in enumerate(cuts):
        assert {of.owner(stream, n, blocks) for stream in range(begin, end)} == {index}
        assert [of.until(stream, end) for stream in range(begin, end)] == [
            min(end - stream // STREAMS * STREAMS, STREAMS) for stream in range(begin, end)
        ]


@pytest.mark.emulated
def test_a_launch_leaves_the_counters_as_it_found_them_so_that_the_next_has_its_bits_too() -> None:
    inputs, outputs = example(CASE), CARD.outputs(CASE, example(CASE))
    launches = gemm_launches(ARCH, CASE, inputs, outputs, **SHARES, resident=5)
    emulator.execute(launches)
    first = outputs["y"].clone()
    outputs["y"].fill_(float("nan"))
    emulator.execute(launches)
    assert proof.differing(outputs["y"], first) == 0


# name: (module, factory, pattern, replacement), and the shares where they are not three
PLANTED: dict[str, tuple[Any, ...]] = {
    "sums taken before they are there": (
        shares, "make_shares", r"isa\.wait_count\(counter, .*\)", "pass",
    ),
    "sums never announced": (shares, "make_shares", r"isa\.atomic_add_i32\(.*", "pass"),
    "a counter that is not set back": (shares, "make_shares", r"isa\.store_u32\(counter, i32\(0\)\)", "pass"),
    "streams added from the last one down": (
        shares, "make_shares", r"place_of\(workspace, owner, i32\(s\), warp, lane\)",
        "place_of(workspace, owner, i32(STREAMS - 1 + stream - s), warp, lane)", 8,
    ),
    "sums of another warp's tile": (
        shares, "make_shares", r"i32\(s\), warp, lane", "i32(s), i32(warp ^ 1), lane",
    ),
    "sums left for the first run": (held, "make_gemm_held", r"run = owner_of\(", "run = 0 * owner_of("),
    "a tile that is finished without its later streams": (
        held, "make_gemm_held", r"by_stream and until < STREAMS", "False",
    ),
    "sums announced before they are left": (
        held, "make_gemm_held", r"n_left, owner = i32\(0\), i32\(0\)", "n_left, owner = i32(until - first), i32(0)",
    ),
}  # fmt: skip
TWO_FULL_TILES: Case = {**CASE, "kind": "residual", "m": 24, "n": 128, "k": 512, "norm": True}


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_of_shares_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, factory, pattern, replacement, *resident = PLANTED[bug]
    from eagle3core.kernels.gemm import launcher

    inputs, outputs = example(TWO_FULL_TILES), CARD.outputs(TWO_FULL_TILES, example(TWO_FULL_TILES))
    # Two streams between others are large and cancel: what was added before them loses its last bits.
    inputs["w"][:, 256:384] = inputs["w"][:, 128:256]
    inputs["x"][:, 128:256] *= 2**20
    inputs["x"][:, 256:384] = -inputs["x"][:, 128:256]
    rebuilt(module, pattern, replacement, monkeypatch, factory, (held, launcher))
    try:
        launches = gemm_launches(ARCH, TWO_FULL_TILES, inputs, outputs, **SHARES, resident=(*resident, 3)[0])
        emulator.execute(launches)
        emulator.execute(launches)
    except EmulationError:
        return
    expected = proof.run(CARD, ARCH, TWO_FULL_TILES, inputs, emulator.execute, RING)
    counters = launches[-1].operands["counters"]
    assert counters.any() or any(proof.differing(outputs[name], expected[name]) for name in outputs), bug


@pytest.mark.reference
def test_what_shares_leave_each_other_fits_below_rows_in_order_and_their_counters_too() -> None:
    held_ones = [one for one in gemm_candidates(ARCH, 256, 1792, 4096, True) if one.by_stream]
    assert held_ones
    for x_tiles, w_tiles in {(one.x_tiles, one.w_tiles) for one in held_ones} | {(24, 8), (16, 12)}:
        assert 4 * shared_sums_words(x_tiles, w_tiles, MULTIPROCESSORS) <= _SUMS_BYTES
        assert shared_counters(w_tiles, MULTIPROCESSORS) <= COUNTERS


@pytest.mark.reference
@pytest.mark.parametrize(
    "about", [{"held": False}, {"resident": 0}, {"cluster": 2, "w_tiles": 8, "x_tiles": 1}, {"kernel": "tile"}]
)
def test_shares_are_for_blocks_that_stay_and_hold_their_totals(about: dict[str, Any]) -> None:
    tiling = Tiling(**{**SHARES, "resident": 4, **about})
    case = {**CASE, "m": 16}
    inputs = example(case)
    with pytest.raises(KernelLimit, match=re.escape("holds its totals")):
        CARD.launches(ARCH, case, inputs, CARD.outputs(case, inputs), **vars(tiling))


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("x_tiles", "w_tiles", "units"), exhaustive_but([(16, 8, 2)], [(16, 8, 2), (16, 4, 2), (16, 12, 1), (24, 8, 2)])
)
def test_shares_compile_without_spills(x_tiles: int, w_tiles: int, units: int) -> None:
    tiling = Tiling("group", x_tiles, w_tiles, units, 16 // units, held=True, resident=MULTIPROCESSORS, by_stream=True)
    variant = gemm_variant(ARCH, "bf16", Epilogue("store"), deepest(ARCH, tiling, 128, blocks=1), True, False)
    assert compile_variant(variant, ARCH, disassemble=True).faults(variant) == []


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [7, MULTIPROCESSORS])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 4096, 4096), (512, 6144, 4096), (130, 1040, 1040)])
def test_shares_have_the_bits_of_whole_tiles_on_the_gpu(m: int, n: int, k: int, resident: int, gpu: Any) -> None:
    device, arch, execute = gpu
    if arch != ARCH:
        pytest.skip(f"warpgroups multiply on {ARCH} alone, and this is {arch}")
    case: Case = {**CASE, "kind": "residual", "m": m, "n": n, "k": k, "norm": True}
    inputs = example(case, device)
    setting = {**SHARES, "x_tiles": 16, "w_tiles": 8, "units": 2, "stages": 7, "resident": resident}
    whole = proof.run(CARD, ARCH, case, inputs, execute, {**setting, "by_stream": False})
    for _ in range(3):  # who waits for whom changes from run to run
        ours = proof.run(CARD, ARCH, case, inputs, execute, setting)
        assert {name: proof.differing(ours[name], whole[name]) for name in ours} == dict.fromkeys(ours, 0)
