"""Two layers' maps one after the other on the kernels' path, each leaving the next one's rows in order: same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_engines import BY_MEANING, write_nano_pair
from torch import Tensor

from eagle3core.checkpoint import load_target
from eagle3core.geometry import BlockGeometry, RopeGeometry
from eagle3core.kernels import proof
from eagle3core.kernels.card import E4M3
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm import launcher, pack_weight, scratch
from eagle3core.kernels.gemm.epilogue import Epilogue, quads_of
from eagle3core.kernels.gemm.fp8.tiling import as_fp8
from eagle3core.kernels.gemm.order.pack import OrderedRows, pack_rows
from eagle3core.kernels.gemm.tiling import Tiling
from eagle3core.kernels.tuned import GemmKey
from eagle3core.step import DeviceRunner
from eagle3core.step.buffers import Activations, Sizes, new_activations
from eagle3core.step.passes import MOST_LEFT_INNER, Emitter, Rows
from eagle3core.step.sizes import DeviceSizes
from eagle3core.step.tree import chain_tree
from eagle3core.weights import pack_checkpoints
from eagle3core.weights.packed import PackedLayer, PackedLinear, PackedMlp

CPU, ROWS, WIDTH, BF16 = torch.device("cpu"), 17, 128, torch.bfloat16
BLOCK = BlockGeometry(WIDTH, WIDTH, 2, 1, 64, 1e-5, RopeGeometry())
ALONE, SHARED = Tiling("group", 3, 4, 1, 2), Tiling("group", 2, 4, 1, 2, split=4, together=True)


class PackingEmitter(Emitter):
    """Packs the rows of every map by a launch."""

    def ordered_for(self, m: PackedLinear, n: int) -> OrderedRows | None:
        return None


def packed_layer(generator: torch.Generator, *, fp8: bool = False) -> PackedLayer:
    def linear(epilogue: Epilogue, rows: int) -> PackedLinear:
        w = torch.randn(rows, WIDTH, generator=generator) * WIDTH**-0.5
        scales = w.abs().amax(1) / 448 if fp8 else None
        stored = w.to(BF16) if scales is None else (w / scales[:, None]).to(E4M3)
        return PackedLinear(epilogue, pack_weight(stored, epilogue), rows, WIDTH, scales=scales)

    normed = quads_of(WIDTH)
    gains = [(1 + torch.randn(WIDTH, generator=generator) / 8).to(BF16) for _ in range(2)]
    return PackedLayer(
        *gains, linear(Epilogue("qkv", normed, head_dim=64, block=64), 256), linear(Epilogue("residual"), WIDTH),
        PackedMlp(linear(Epilogue("swiglu", normed), 2 * WIDTH), linear(Epilogue("residual"), WIDTH)),
    )  # fmt: skip


def follow(emit: Emitter, *, fp8: bool) -> tuple[dict[str, Tensor], list[str]]:
    """What the maps from one layer's attention to the next one's leave behind, and the launches' names."""
    generator = torch.Generator().manual_seed(3)
    layer, following = packed_layer(generator, fp8=fp8), packed_layer(generator, fp8=fp8)
    act: Activations = new_activations(None, BLOCK, Sizes(ROWS, ((1, ROWS),), 64), BF16, CPU)
    act.mixed.copy_(torch.randn(act.mixed.shape, generator=generator))
    stream = torch.randn(ROWS, WIDTH, generator=generator).to(BF16)
    out, pages = (
        torch.zeros_like(stream),
        (torch.zeros(1, 1, 64, 64, dtype=BF16), torch.zeros(1, 1, 64, 64, dtype=BF16)),
    )
    places = torch.arange(ROWS, dtype=torch.int32)
    empty = torch.zeros(1, dtype=torch.int32)
    rows = Rows(places, places, empty, empty[:, None], torch.zeros(1, ROWS, 1, dtype=torch.int32))
    first = emit.ordered_for(layer.o, ROWS)
    if first is not None:  # as attention would have left it
        emulator.execute([pack_rows("sm_90a", act.mixed, first.words, first.x_tiles, 1)])
    calls = emit.project(layer, act, ROWS, stream, BLOCK)
    left = emit.ordered_for(following.qkv, ROWS)
    calls += emit.mlp(layer, act, ROWS, out, following.attn_gain, BLOCK, left)
    calls += emit.qkv(following, act.scaled, act.sums, act, rows, pages, BLOCK, left)
    launches = [launch for call in calls for launch in call.launches]
    emulator.execute(launches)
    made = {"middle": act.middle, "act": act.act, "out": out, "scaled": act.scaled, "sums": act.sums, "q": act.q}
    return {**made, "k": pages[0], "v": pages[1]}, [one.variant.name for one in launches]


@pytest.mark.emulated
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tiling", [ALONE, pytest.param(SHARED, marks=pytest.mark.slow)])
def test_maps_that_leave_rows_for_the_next_give_the_bits_of_maps_whose_rows_are_packed(
    tiling: Tiling, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "choose_tiling", lambda *shape, **how: tiling)
    monkeypatch.setattr(launcher, "choose_fp8_tiling", lambda *shape, **how: as_fp8(tiling))
    monkeypatch.setattr(scratch, "tiling_for", lambda *shape: tiling)
    ours, launches = follow(Emitter("sm_90a", scratch=scratch.workspace(CPU)), fp8=fp8)
    expected, packing = follow(PackingEmitter("sm_90a", scratch=scratch.workspace(CPU)), fp8=fp8)
    assert len(launches) == 4, "no launch packs"
    assert sum("pack_rows" in name for name in packing) == 4
    assert {name: proof.differing(ours[name], expected[name]) for name in expected} == dict.fromkeys(expected, 0)
    assert all(tensor.float().abs().sum() > 0 for tensor in ours.values())


@pytest.mark.reference
def test_gate_and_up_leave_nothing_of_a_prompts_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "tiling_for", lambda *shape: ALONE)
    emit = Emitter("sm_90a", scratch=scratch.workspace(CPU))
    down = packed_layer(torch.Generator().manual_seed(3)).mlp.down
    assert emit.inner_for(down, MOST_LEFT_INNER) is not None
    assert emit.inner_for(down, MOST_LEFT_INNER + 1) is None
    assert emit.ordered_for(down, MOST_LEFT_INNER + 1) is not None, "for want of room it would be None as well"


@pytest.mark.reference
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_an_engines_emitter_knows_the_dtype_of_its_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = load_target(write_nano_pair(tmp_path)[0], dtype=dtype)
    target, _ = pack_checkpoints(stored, None, device=CPU, block=64, weights="fp8", draft_weights="as_stored")
    sizes = DeviceSizes(1, 64, 64, chain_tree(0), chunk=16, span=8)
    assert DeviceRunner(target, None, sizes, arch="sm_90a", replayer=BY_MEANING).emit.dtype == dtype


@pytest.mark.reference
def test_rows_are_left_by_the_tiling_of_the_next_maps_own_format_and_of_the_dtype_of_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def tiling_for(arch: str, rows: int, key: GemmKey) -> Tiling:
        asked.append(key.dtype)
        return ALONE

    monkeypatch.setattr(scratch, "tiling_for", tiling_for)
    generator, room = torch.Generator().manual_seed(3), scratch.workspace(CPU)
    plain, fp8 = packed_layer(generator).o, packed_layer(generator, fp8=True).o
    blocks = replace(fp8, scales=torch.ones(WIDTH // 8, 1))
    for m, dtype in ((plain, torch.float16), (fp8, BF16), (fp8, torch.float16), (blocks, BF16)):
        assert Emitter("sm_90a", scratch=room, dtype=dtype).ordered_for(m, ROWS) is not None
    assert asked == ["bf16", "bf16_fp8", "f16_fp8", "bf16_fp8_blocks"]
    assert Emitter("sm_90a", scratch=room, dtype=torch.float32).ordered_for(fp8, ROWS) is None
