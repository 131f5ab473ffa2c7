"""Tables of slots: what the device holds is what was told last, and blocks come with zeros."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from torch import Tensor

from eagle3core.cache import BlockTables

pytestmark = pytest.mark.reference

N_SLOTS, ENTRIES, N_BLOCKS = 3, 6, 20


class Copies:
    """Copies at once, and counts."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, to: Tensor, numbers: array[int] | memoryview[int]) -> None:
        self.n += 1
        to.copy_(torch.tensor(list(numbers), dtype=torch.int32))


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def table() -> Tensor:
    return torch.full((N_SLOTS, ENTRIES), -1, dtype=torch.int32)


@pytest.fixture
def pages() -> list[Tensor]:
    return [torch.zeros(2, N_BLOCKS, 1, 4, 2), torch.zeros(N_BLOCKS, 1, 4, 2)]


@pytest.fixture
def tables(table: Tensor, pages: list[Tensor], copies: Copies) -> BlockTables:
    return BlockTables(table, pages, copies)


def spoil(pages: list[Tensor], blocks: list[int]) -> None:
    for cache in pages:
        cache.index_fill_(cache.dim() - 4, torch.tensor(blocks), torch.inf)


def spoilt(pages: list[Tensor]) -> set[int]:
    """Blocks that hold something else than zeros in any cache."""
    return {b for cache in pages for b in range(N_BLOCKS) if bool(cache.select(cache.dim() - 4, b).any())}


def test_the_device_holds_what_was_told_last_in_any_order(tables: BlockTables, table: Tensor) -> None:
    draw, told = random.Random(0), [list[int]() for _ in range(N_SLOTS)]
    for _ in range(300):
        slot = draw.randrange(N_SLOTS)
        held = told[slot]
        match draw.choice(["assign", "extend", "cut"]):
            case "assign":
                told[slot] = draw.sample(range(N_BLOCKS), draw.randint(1, ENTRIES))
                tables.assign(slot, told[slot])
            case "extend":
                more = draw.sample(range(N_BLOCKS), draw.randint(0, ENTRIES - len(held)))
                tables.extend(slot, len(held), more)
                told[slot] = held + more
            case _:
                n_kept = draw.randint(0, len(held))
                tables.cut(slot, n_kept)
                told[slot] = held[:n_kept]
        assert table.tolist() == [[*blocks, *[-1] * (ENTRIES - len(blocks))] for blocks in told]


def test_the_same_blocks_again_are_not_copied(tables: BlockTables, copies: Copies) -> None:
    for blocks in ([0, 1], range(2), [0, 1, 2], [0, 1, 2], [4]):
        tables.assign(1, blocks)
    assert copies.n == 3


def test_others_rows_are_zeroed_as_a_block_is_given_except_those_to_keep(
    tables: BlockTables, pages: list[Tensor]
) -> None:
    tables.assign(0, [3, 5, 6, 9])
    spoil(pages, [3, 5, 6, 9])
    tables.assign(1, [3, 5, 6], 1)
    assert spoilt(pages) == {3, 9}
    spoil(pages, [5])
    tables.extend(2, 0, [5, 9])
    assert spoilt(pages) == {3}


def test_only_blocks_that_somebody_had_are_zeroed(tables: BlockTables, pages: list[Tensor]) -> None:
    tables.assign(0, [3, 4])
    spoil(pages, [3, 4, 7])
    tables.clean([3, 7, 8])
    assert spoilt(pages) == {4, 7}
    spoil(pages, [3])
    tables.assign(1, [3])
    assert spoilt(pages) == {3, 4, 7}, "a block that was zeroed holds zeros until somebody has had it"
