"""The bulk reader reads every byte once, its sums say so, and a run's ceiling is the best proven rate."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle3core.errors import KernelLimit
from eagle3core.kernels import ARCHES, compile_variant
from eagle3core.kernels.card import SHARED_BYTES_SM
from lab.errors import RunFailed
from lab.probes.ceilings import known_gb_per_s
from lab.probes.kernels.reading import ceiling
from lab.probes.kernels.reading.bulk import RINGS, Ring, bulk_variants, is_read_whole, reads

SMALL = Ring(warps=2, stages=3, piece=512, blocks=1)


def words(n: int) -> torch.Tensor:
    """Random words of all 32 bits."""
    return torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(n))


@pytest.mark.emulated
@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("n_pieces", [1, 3, 8])
def test_the_sums_are_the_buffers_and_each_word_is_in_them_once(n_pieces: int, consecutive: bool) -> None:
    from eagle3core.kernels import emulator

    x = words(2 * 2 * n_pieces * 128 + 96)  # two blocks of two warps, and an end that is too short to be read
    item, sums, n_read = reads(SMALL, x, 2, consecutive=consecutive)
    assert n_read == x.nbytes - 96 * 4
    assert not is_read_whole(x, sums, n_read), "poisoned"
    emulator.execute([item])
    assert is_read_whole(x, sums, n_read)
    ceiling.check("whole", x, sums, n_read)
    before = sums.clone()
    for word in (0, 127, n_read // 8, n_read // 4 - 1):  # of the first piece, between two, and the last
        x[word] += 1
        emulator.execute([item])
        assert int((sums - before).sum()) == 1
        before.copy_(sums)


@pytest.mark.emulated
def test_a_reader_that_takes_one_piece_twice_and_leaves_another_out_is_refused() -> None:
    from eagle3core.kernels import emulator

    x = words(4 * 4 * 128)
    item, sums, n_read = reads(SMALL, x, 2, consecutive=True)
    values = list(item.values)
    values[3] = 0  # the pitch: each warp reads its first piece again and again
    emulator.execute([replace(item, values=tuple(values))])
    with pytest.raises(RunFailed, match="differ"):
        ceiling.check("bent", x, sums, n_read)


@pytest.mark.emulated
def test_a_ring_as_it_is_timed_reads_its_pieces() -> None:
    from eagle3core.kernels import emulator

    ring = RINGS["sm_90a"][1]
    x = words(ring.warps * 9 * ring.piece // 4)
    item, sums, n_read = reads(ring, x, 1, consecutive=False)
    emulator.execute([item])
    assert n_read == x.nbytes
    assert is_read_whole(x, sums, n_read)


@pytest.mark.compiled
@pytest.mark.parametrize("arch", ARCHES)
def test_every_bulk_reader_compiles_and_keeps_its_promises(arch: str) -> None:
    variants = bulk_variants(arch)
    assert bool(variants) == (arch != "sm_80"), "which has no bulk copies"
    for variant in variants:
        assert compile_variant(variant, arch, disassemble=True).faults(variant) == []


@pytest.mark.reference
def test_rings_fill_the_shared_memory_that_a_multiprocessor_has() -> None:
    for arch, rings in RINGS.items():
        for ring in rings:
            taken = ring.blocks * (ring.warps * ring.stages * (ring.piece + 8) + 1024)
            assert 0.8 * SHARED_BYTES_SM[arch] < ring.bytes_under_way < taken <= SHARED_BYTES_SM[arch], str(ring)


@pytest.mark.reference
def test_a_cpu_reads_by_torch_and_says_why() -> None:
    torch.set_num_threads(1)
    found = ceiling.run_ceiling(torch.device("cpu"))
    assert found.values() == {
        "ceiling_of_run_gb_per_s": found.rates["torch.sum"], "ceiling_of_run_reader": "torch.sum",
        "ceiling_of_run_without_bulk": "a CPU has no bulk copies",
    }  # fmt: skip
    assert found.gb_per_s > 0
    assert ceiling.clock_values("clocks_before", torch.device("cpu")) == {}


@pytest.mark.reference
def test_on_a_gpu_the_best_ring_counts_and_without_one_torchs_reads_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no GPU here, so its architecture and the rates are given."""
    by_torch = [SimpleNamespace(way="copy", gb_per_s=900.0), SimpleNamespace(way="read", gb_per_s=700.0)]
    rates: dict[str, float] = {"one ring": 4000.0, "another": 4500.0, "a third": 4200.0}
    monkeypatch.setattr(ceiling.launch, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(ceiling, "memory_ceilings", lambda *a, **k: by_torch)
    monkeypatch.setattr(ceiling, "bulk_rates", lambda *a: rates)
    cuda = torch.device("cuda")
    assert ceiling.run_ceiling(cuda) == ceiling.RunCeiling(4500.0, "another", rates)

    def refused(*_: object) -> dict[str, float]:
        raise KernelLimit("9 stages", "up to 8", "use fewer")

    monkeypatch.setattr(ceiling, "bulk_rates", refused)
    found = ceiling.run_ceiling(cuda)
    assert (found.gb_per_s, found.reader) == (700.0, "torch.sum")
    assert "9 stages" in found.values()["ceiling_of_run_without_bulk"]
    monkeypatch.setattr(ceiling, "bulk_rates", lambda *a: {})
    assert ceiling.run_ceiling(cuda).reason == "this architecture has no bulk copies"


@pytest.mark.gpu
def test_bulk_copies_read_on_a_gpu_no_faster_than_its_memory_is(gpu: None) -> None:
    found = ceiling.run_ceiling(torch.device("cuda"))
    known = known_gb_per_s(torch.cuda.get_device_name())
    assert found.reader.startswith("bulk copies"), found.reason
    # How fast they are is a row's matter: beside other processes they read less.
    assert known is None or 0 < found.gb_per_s < 1.06 * known
