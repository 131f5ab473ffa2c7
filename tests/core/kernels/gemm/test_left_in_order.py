"""What the next map reads, left in the order in which its warpgroups fetch it: by who makes it, beside the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.card import Case, Tensors
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm.card import CARD
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.order.pack import OrderedRows, pack_rows_reference, packed_words
from eagle3core.kernels.gemm.reference import epilogue_of, gemm_outputs, n_weight_rows, packed_inputs
from eagle3core.kernels.gemm.scratch import ordered_input, workspace, workspace_bytes
from eagle3core.kernels.gemm.tiling import Tiling
from eagle3core.step import launches_of, step_program
from lab.pairs.planted import find_geometry
from lab.probes.proofs.plans import shapes_of
from lab.probes.sweeps.in_step import step_setting

CPU = torch.device("cpu")
RESIDUAL: Case = {"kind": "residual", "k": 128, "n": 128, "dtype": "bf16", "packed": True}
SWIGLU: Case = {"kind": "swiglu", "k": 128, "n": 128, "dtype": "f16", "packed": True, "norm": True}
RING, BULK = Tiling("ring", 2, 2, 1, 2), Tiling("bulk", 1, 1, 1, 2)
TILE = Tiling("tile", 2, 2, 1, 2, 2, 1)
GROUP = Tiling("group", 3, 4, 1, 2)
HELD = replace(GROUP, held=True)
FP8, BLOCKS = {"fp8": True}, {"fp8": "blocks", "k": 512}


def run(case: Case, tiling: Tiling, leave: OrderedRows | None, seed: int) -> Tensors:
    inputs = packed_inputs(case, CARD.example(case, proof.generator(seed, CPU), CPU))
    outputs = gemm_outputs(case, inputs)
    others = {name: t for name, t in {**inputs, **outputs}.items() if name not in ("x", "w", "y")}
    emulator.execute(gemm(
        "sm_90a", epilogue_of(case), x=inputs["x"], w=inputs["w"], y=outputs["y"],
        k=case["k"], packed=True, weight_rows=n_weight_rows(case), tiling=tiling, scratch=workspace(CPU), leave=leave,
        operands=others,
    ))  # fmt: skip
    return outputs


def wrong(case: Case, tiling: Tiling, x_tiles: int, seed: int = 5) -> dict[str, int]:
    """Values that differ, by where: in the outputs because rows are left as well, left in another place than packing
    the rows puts them, or written for rows that are not there."""
    m, n = case["m"], case["n"]
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float16
    words = torch.full((2 * packed_words(m, n, x_tiles, 1),), float("nan"), dtype=dtype)
    alone = run(case, tiling, None, seed)
    made = run(case, tiling, OrderedRows(words.view(torch.float32), x_tiles), seed)
    rows = made["second" if case["kind"] == "residual" else "y"]
    expected, there = (pack_rows_reference(x, x_tiles, 1).view(-1) for x in (rows, torch.ones_like(rows)))
    found = {name: proof.differing(alone[name], made[name]) for name in made}
    found["left"] = int((words.view(torch.int16) != expected.view(torch.int16))[there > 0].sum())
    found["past the last row"] = int((~words[there == 0].isnan()).sum())
    return {name: count for name, count in found.items() if count}


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("case", "m", "tiling", "x_tiles"),
    [
        (RESIDUAL, 11, RING, 1),
        (RESIDUAL, 5, BULK, 2),
        (SWIGLU, 11, BULK, 3),
        pytest.param(SWIGLU, 19, TILE, 2, marks=pytest.mark.slow),
        pytest.param(RESIDUAL, 27, replace(GROUP, split=4), 3, marks=pytest.mark.slow),
        (SWIGLU, 27, GROUP, 4),
        (SWIGLU, 27, HELD, 2),
        (RESIDUAL, 27, replace(HELD, resident=1), 4),
        pytest.param({**RESIDUAL, "residual": False, "dtype": "f16"}, 27, HELD, 3, marks=pytest.mark.slow),
        pytest.param(RESIDUAL, 19, replace(GROUP, split=4, together=True), 1, marks=pytest.mark.slow),
        pytest.param({**RESIDUAL, "residual": False, "dtype": "f16"}, 19, TILE, 3, marks=pytest.mark.slow),
        ({**RESIDUAL, **FP8}, 11, RING, 2),
        ({**SWIGLU, **FP8}, 5, BULK, 1),
        ({**SWIGLU, **FP8}, 27, GROUP, 2),
        ({**RESIDUAL, **BLOCKS}, 11, RING, 3),
        pytest.param(
            {**RESIDUAL, **FP8}, 19, replace(TILE, w_tiles=4, warps_x=1, warps_w=4), 2, marks=pytest.mark.slow
        ),
        pytest.param({**SWIGLU, **BLOCKS}, 27, GROUP, 3, marks=pytest.mark.slow),
        pytest.param({**RESIDUAL, **FP8}, 19, replace(GROUP, split=4, together=True), 4, marks=pytest.mark.slow),
    ],
)
def test_every_kernel_leaves_each_element_where_packing_the_rows_puts_it_and_every_bit_as_before(
    case: Case, m: int, tiling: Tiling, x_tiles: int
) -> None:
    assert wrong({**case, "m": m}, tiling, x_tiles) == {}


@pytest.mark.reference
def test_two_places_take_turns_and_a_launch_that_would_write_over_what_it_reads_is_refused() -> None:
    scratch = workspace(torch.device("meta"))
    near, far = (ordered_input("sm_90a", 64, 4096, 4096, torch.bfloat16, scratch, far=far) for far in (False, True))
    assert near is not None
    assert far is not None
    bf16 = torch.zeros(64, 4096, dtype=torch.bfloat16, device="meta")

    def launch(ordered: OrderedRows | None, leave: OrderedRows) -> int:
        w, operands = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="meta"), {"second": bf16, "gain": bf16[0]}
        return len(gemm(
            "sm_90a", Epilogue("residual", has_residual=False), x=bf16, w=w, y=bf16, k=4096, packed=True,
            weight_rows=4096, scratch=scratch, ordered=ordered, leave=leave, operands=operands,
        ))  # fmt: skip

    assert launch(near, far) == launch(far, near) == 1
    assert launch(None, far) == 2
    for place in (near, far):
        with pytest.raises(KernelLimit, match="the next map's x at word"):
            launch(place, place)
    assert ordered_input("sm_90a", 4096, 4096, 4096, torch.bfloat16, scratch, far=True) is None, "there is no room"


@pytest.mark.reference
def test_no_other_map_than_those_of_residuals_and_activations_leaves_rows_in_an_order() -> None:
    with pytest.raises(KernelLimit, match="the order of head"):
        Epilogue("head", ordered_tiles=2).check()


@pytest.mark.reference
@pytest.mark.parametrize(("drafts", "packs"), [("dynamic-64/6/8", 1), ("dynamic-16/4/4", 0), ("plain", 0)])
def test_in_a_step_only_what_the_embedding_made_is_packed(drafts: str, packs: int) -> None:
    runner = shapes_of(find_geometry("llama-3.1-8b"), "sm_90a").runner(step_setting(drafts, 64))
    program = step_program(runner.emit, runner.target, runner.draft, runner.state, 1)
    target = [one.variant.name for stage in program if stage.name.startswith("target.") for one in stage.launches]
    assert sum("pack_rows" in name for name in target) == packs
    assert len(launches_of(program)) > len(target)


@pytest.mark.reference
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("rows", [512, 1024, 1999, 2048])
def test_both_places_begin_where_a_bulk_copy_may_whatever_the_scratch_was_sized_for(rows: int, far: bool) -> None:
    meta = torch.device("meta")
    for widest in (14336, 14368, 28672):
        scratch = workspace(meta, workspace_bytes(rows, widest))
        for n, weight_rows, k in ((64, 4096, 4096), (rows, 28672, 4096)):
            place = ordered_input("sm_90a", n, weight_rows, k, torch.bfloat16, scratch, far=far)
            assert place is not None
            assert place.words.storage_offset() * place.words.element_size() % 16 == 0
            assert place.words.storage_offset() + place.words.numel() <= scratch[0].numel()
