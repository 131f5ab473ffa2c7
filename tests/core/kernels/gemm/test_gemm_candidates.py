"""Tilings that a sweep tries: the kernels take every one, they differ, and there are few enough to time."""

import pytest
import torch

from eagle3core.kernels.card import ARCHES, SHARED_BYTES
from eagle3core.kernels.gemm.candidates import gemm_candidates
from eagle3core.kernels.gemm.card import LLAMA_8B
from eagle3core.kernels.gemm.epilogue import Epilogue
from eagle3core.kernels.gemm.launcher import gemm
from eagle3core.kernels.gemm.reference import n_weight_rows
from eagle3core.kernels.gemm.scratch import workspace, workspace_bytes

META = torch.device("meta")
MAPS = [(n_weight_rows(case), case["k"]) for case in LLAMA_8B]
OTHERS = [(2880, 2880), (48, 272), (4096, 12288)]  # K that is no multiple of 128 or of 32, and a draft's input

pytestmark = pytest.mark.reference


def launches(arch, rows, n_w, k, tiling, packed):
    x, w, y = (torch.empty(*shape, dtype=torch.bfloat16, device=META) for shape in ((rows, k), (n_w, k), (rows, n_w)))
    return gemm(arch, Epilogue("store"), x=x, w=w, y=y, k=k, packed=packed, weight_rows=n_w, tiling=tiling,
                scratch=workspace(META, workspace_bytes(rows, k)), operands={})  # fmt: skip


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("packed", [True, False])
def test_the_kernels_take_every_tiling_that_is_tried(arch, packed):
    for rows in (1, 8, 9, 16, 17, 24, 32, 33, 48, 64, 240):
        for n_w, k in [*MAPS, *OTHERS]:
            found = gemm_candidates(arch, rows, n_w // 16, k, packed)
            assert found
            assert len(set(found)) == len(found)
            for tiling in found:
                assert tiling.shared_bytes <= SHARED_BYTES[arch]
                assert launches(arch, rows, n_w, k, tiling, packed)[-1].variant.name.count(tiling.name) == 1


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize(("n_w", "k"), MAPS)
def test_bulk_copies_are_tried_for_9_to_16_rows_where_they_exist(arch, n_w, k):
    def of_bulk(rows, arch=arch, k=k, packed=True):
        found = gemm_candidates(arch, rows, n_w // 16, k, packed)
        return {(t.w_tiles, t.units, t.stages) for t in found if t.kernel == "bulk" and t.x_tiles == 2}

    assert of_bulk(9) == of_bulk(16) >= {(1, 4, 3), (1, 4, 4), (1, 4, 6), (1, 2, 6), (1, 2, 8), (2, 2, 4)}
    assert not of_bulk(8)
    assert not of_bulk(17)
    assert not of_bulk(16, arch="sm_80")
    assert not of_bulk(16, packed=False)
    assert not of_bulk(16, k=2896)  # half a unit at the end


@pytest.mark.parametrize("rows", [17, 24, 32, 33, 48, 64])
@pytest.mark.parametrize(("n_w", "k"), [*MAPS, (4096, 12288)])
def test_17_to_64_rows_try_at_most_12_tilings_of_several_heights_units_and_depths(rows, n_w, k):
    found = gemm_candidates("sm_90a", rows, n_w // 16, k, True)
    groups = [tiling for tiling in found if tiling.kernel == "group"]
    assert 7 <= len(found) <= 12
    assert len({tiling.w_tiles for tiling in groups}) >= 3
    assert {tiling.units for tiling in groups} == {2, 4}
    assert len({tiling.stages for tiling in groups}) >= 3
    assert any(tiling.together for tiling in groups) == (n_w <= 6144), "small maps share K, large ones need not"
    for tiling in groups:
        assert 8 * tiling.x_tiles >= rows, "one block holds all rows"


@pytest.mark.reference
def test_clusters_compete_where_blocks_of_x_are_a_multiple_and_nobody_shares_k() -> None:
    def clusters(rows: int) -> set[tuple[int, int]]:
        found = gemm_candidates("sm_90a", rows, 256, 4096, packed=True)
        return {(-(-rows // (8 * one.x_tiles)), one.cluster) for one in found if one.cluster > 1 and one.split == 1}

    assert clusters(512) == {(2, 2), (4, 2), (4, 4), (8, 2)}
    assert clusters(384) == {(2, 2), (4, 2), (6, 2)}, "two blocks of 192 rows, three of 128 or four of 96, six of 64"
    assert clusters(64) == set()
    assert clusters(128) == {(2, 2)}, "of 64 rows, which hold their totals"
    assert not any(one.cluster > 1 and one.split > 1 for one in gemm_candidates("sm_90a", 512, 256, 4096, packed=True))
