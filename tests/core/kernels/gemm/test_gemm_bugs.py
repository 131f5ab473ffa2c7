"""Planted bugs of the GEMM's pipeline are found, and what only its order or its waits change is seen."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from faulty_emulator import faulty
from gemm_examples import STORE, example

from eagle3core.kernels import proof
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.emulator.machine import EmulationError
from eagle3core.kernels.gemm.card import CARD, gemm_launches

TILE = {"kernel": "tile", "x_tiles": 2, "w_tiles": 2, "warps_x": 2, "warps_w": 1, "units": 1, "stages": 3}


def shallow_waits():
    return faulty(COPY_WAIT=(emulator.COPY_WAIT[0], *emulator.COPY_WAIT[2:], emulator.COPY_WAIT[15]))


def no_block_barrier():
    names = {n: getattr(emulator.cuda, n) for n in ("threadIdx", "blockIdx", "gridDim", "blockDim", "shared", "local")}
    return faulty(cuda=SimpleNamespace(**names, syncthreads=lambda: None, syncwarp=emulator.cuda.syncwarp))


def swapped_rows():
    """Each lane's piece lands where the lane of the neighbouring row would look for it: a wrong swizzle."""

    def copy16_fill(target, source, n_bytes):
        emulator.copy16_fill(target ^ 64, source, n_bytes)

    return faulty(copy16=lambda target, source: copy16_fill(target, source, 16), copy16_fill=copy16_fill)


@pytest.mark.emulated
@pytest.mark.parametrize("setting", [{}, TILE], ids=["ring", "tile"])
@pytest.mark.parametrize(
    ("plant", "message"), [(shallow_waits, "under way"), (no_block_barrier, "race|nobody has written|under way")]
)
def test_a_planted_bug_in_the_pipeline_is_found(setting, plant, message):
    inputs = example(STORE)
    outputs = CARD.outputs(STORE, inputs)
    with pytest.raises(EmulationError, match=message):
        emulator.execute(gemm_launches("sm_90a", STORE, inputs, outputs, **setting), isa=plant())


@pytest.mark.emulated
def test_a_wrong_swizzle_is_found_by_the_machine_where_lanes_are_private_and_by_the_numbers_where_they_share():
    inputs = example(STORE)
    outputs = CARD.outputs(STORE, inputs)
    with pytest.raises(EmulationError, match=r"race|nobody has written"):
        emulator.execute(gemm_launches("sm_90a", STORE, inputs, outputs), isa=swapped_rows())
    emulator.execute(gemm_launches("sm_90a", STORE, inputs, outputs, **TILE), isa=swapped_rows())
    assert not all(d.passes for d in proof.deviations(CARD, STORE, inputs, outputs))


@pytest.mark.emulated
def test_one_block_too_many_is_out_of_bounds():
    inputs = example(STORE)
    (launch,) = gemm_launches("sm_90a", STORE, inputs, CARD.outputs(STORE, inputs))
    x, y, z = launch.grid
    with pytest.raises(EmulationError, match="out of bounds"):
        emulator.execute([replace(launch, grid=(x + 1, y, z))])


@pytest.mark.emulated
def test_a_split_that_merges_in_another_order_changes_bits():
    case = {**STORE, "m": 16, "k": 512}
    inputs = example(case)
    # The first and the last stream all but cancel, so that the order of addition shows after rounding to bf16.
    inputs["x"][:, :128] *= 1e5
    inputs["x"][:, 384:], inputs["w"][:, 384:] = inputs["x"][:, :128], -inputs["w"][:, :128]
    split = {"kernel": "tile", "x_tiles": 2, "w_tiles": 1, "warps_x": 1, "warps_w": 1, "stages": 2, "units": 1}
    ours = proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {**split, "split": 4})["y"]
    outputs = CARD.outputs(case, inputs)
    (launch,) = gemm_launches("sm_90a", case, inputs, outputs, **split, split=4)
    workspace = launch.values[[p.name for p in launch.variant.parameters].index("workspace")]
    assert workspace.nbytes == 3 * 4 * 1024  # 3 blocks, 4 streams, 16 x 16 sums

    def exchanged(address):
        """The second and the last stream's sums change places."""
        stream = (address - workspace.data_ptr()) // 1024 % 4
        return emulator.load_f32x4_l2(address + 1024 * {1: 2, 3: -2}.get(stream, 0))

    emulator.execute([launch], isa=faulty(load_f32x4_l2=exchanged))
    assert proof.differing(ours, outputs["y"]) > 0
    assert torch.allclose(ours.float(), outputs["y"].float(), atol=0.2)


@pytest.mark.emulated
def test_a_lost_stream_breaks_the_2x_rule():
    inputs = example(STORE)
    outputs = CARD.outputs(STORE, inputs)
    (launch,) = gemm_launches("sm_90a", STORE, inputs, outputs)
    emulator.execute([launch])
    assert all(d.passes for d in proof.deviations(CARD, STORE, inputs, outputs))
    outputs["y"] -= inputs["x"][:, -64:] @ inputs["w"][:, -64:].T  # what a lost last stream would leave out
    assert not all(d.passes for d in proof.deviations(CARD, STORE, inputs, outputs))


@pytest.mark.emulated
def test_weights_are_read_before_the_previous_kernel_ends_and_nothing_else_is():
    """The order of waits is checked by the emulator; here, that the ring really is filled early."""
    inputs = example(STORE)
    events = []

    def copy16(target, source):
        events.append("weights")
        emulator.copy16(target, source)

    def wait_previous():
        events.append("wait")
        emulator.wait_previous()

    execute = emulator.execute
    execute(gemm_launches("sm_90a", STORE, inputs, CARD.outputs(STORE, inputs)),
            isa=faulty(copy16=copy16, wait_previous=wait_previous))  # fmt: skip
    assert events.index("weights") < events.index("wait")
