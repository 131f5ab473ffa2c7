"""What passes over prompts are made of: which shapes there are, who is in one, how large it is beside others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3core.batching.share import ReadingShare
from eagle3core.step.admission import Reading, SlotRequest, is_full, parts_of_pass
from eagle3core.step.sizes import ChunkShape, DeviceSizes, chunk_shapes, largest_pass
from eagle3core.step.tree import chain_tree

pytestmark = pytest.mark.reference

SIZES = DeviceSizes(8, 512, 520, chain_tree(3), chunk=512)


def readings_of(lengths: list[int]) -> list[Reading]:
    return [Reading(i, SlotRequest(i, [0] * n, 1, ()), 0) for i, n in enumerate(lengths)]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12))
def test_every_prompt_is_read_once_and_in_order_in_the_smallest_pass_that_holds_it(lengths: list[int]) -> None:
    for kernels, most in ((True, None), (False, None), (True, 200), (False, 100)):
        shapes, readings = chunk_shapes(SIZES, kernels=kernels), readings_of(lengths)
        largest = largest_pass(shapes, SIZES.span, most)
        while left := [reading for reading in readings if not reading.is_done]:
            parts, shape = parts_of_pass(left, shapes, largest)
            counts = [part.n for part in parts]
            assert shape.holds(counts)
            assert shape.rows <= (most or SIZES.chunk)
            assert not any(other.holds(counts) for other in shapes if other.rows < shape.rows)
            assert [part.reading for part in parts] == left[: len(parts)], "first come first served"
            for reading, n in parts[:-1]:
                assert n == reading.n_left, "only the last one is cut"
            assert len(parts) == len(left) or is_full(left[: len(parts)], largest)
            for reading, n in parts:
                reading.n_read += n


def test_shapes_of_passes_double_in_whole_spans_where_kernels_run_and_begin_with_less_elsewhere() -> None:
    assert chunk_shapes(SIZES, kernels=True) == [ChunkShape(n, 64) for n in (1, 2, 4, 8)]
    wide = chunk_shapes(replace(SIZES, chunk=2048), kernels=True)
    assert [shape.rows for shape in wide] == [64, 128, 256, 512, 1024, 2048]
    assert chunk_shapes(replace(SIZES, chunk=192), kernels=True)[-1] == ChunkShape(3, 64)
    shapes = chunk_shapes(SIZES, kernels=False)
    assert shapes[0] == (1, 16)
    assert shapes[-1].rows == 512
    assert {shape.rows for shape in shapes} == {16, 32, 64, 128, 256, 512}
    assert chunk_shapes(replace(SIZES, chunk=8, span=8), kernels=False) == [ChunkShape(1, 8)]


def test_the_largest_pass_is_of_whole_spans_and_one_span_where_none_is_small_enough() -> None:
    for kernels in (True, False):
        shapes = chunk_shapes(SIZES, kernels=kernels)
        found = [largest_pass(shapes, SIZES.span, most) for most in (None, 512, 511, 64, 7)]
        assert found == [ChunkShape(n, 64) for n in (8, 8, 4, 1, 1)]


def test_a_pass_beside_running_requests_is_as_large_as_their_share_allows() -> None:
    assert [ReadingShare(share).most_rows for share in (1.0, 0.8, 0.5, 0.2)] == [None, pytest.approx(2048), 512, 128]


def test_many_short_prompts_fill_wide_passes_and_the_rest_of_a_long_one_takes_a_small_pass() -> None:
    sizes = replace(SIZES, n_slots=64, chunk=2048)
    shapes = chunk_shapes(sizes, kernels=True)

    def rows_of_passes(lengths: list[int]) -> list[int]:
        found, readings = [], readings_of(lengths)
        while left := [reading for reading in readings if not reading.is_done]:
            parts, shape = parts_of_pass(left, shapes, shapes[-1])
            assert sum(part.n == part.reading.n_left for part in parts) <= sizes.n_ends
            found.append(shape.rows)
            for reading, n in parts:
                reading.n_read += n
        return found

    assert rows_of_passes([100] * 64) == [2048] * 4
    assert rows_of_passes([2048 * 3 + 20]) == [2048, 2048, 2048, 64]
    assert rows_of_passes([64]) == [64]
    assert rows_of_passes([512, 1]) == [1024]
