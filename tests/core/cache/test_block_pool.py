"""No block of the pool is lost, owned twice or given away while somebody holds it; names lead to what was named."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from eagle3core import InvariantViolated
from eagle3core.cache import BlockPool, extend_names

pytestmark = pytest.mark.reference


class Ledger:
    """An account of its own: who holds what by plain sets and lists, and what each block is said to hold.

    Holders are numbers; a holder has its blocks in the order of its tokens.
    """

    def __init__(self, n_blocks: int) -> None:
        self.pool, self.n_blocks = BlockPool(n_blocks), n_blocks
        self.holders: dict[int, list[int]] = {}
        self.name_of: dict[int, bytes] = {}  # of blocks whose content is still there
        self.let_go: list[int] = []  # named blocks that nobody holds, longest first
        self._n_holders = 0

    def take(self, n: int) -> None:
        """A new holder of `n` blocks, or nothing where there are fewer."""
        held = self.held()
        taken = self.pool.take(n)
        if n > self.n_blocks - len(held):
            assert taken is None
            return
        assert taken is not None
        assert len(set(taken)) == n
        assert not held & set(taken), "a block of two owners"
        n_thrown = max(0, n - (self.n_blocks - len(held) - len(self.let_go)))
        thrown, self.let_go = self.let_go[:n_thrown], self.let_go[n_thrown:]
        assert not set(taken) & set(self.let_go), "what was let go later is thrown away later"
        for block in thrown:
            del self.name_of[block]
        self.holders[self._n_holders] = taken
        self._n_holders += 1

    def grow(self, holder: int, n: int) -> None:
        """More blocks for a holder."""
        before = self._n_holders
        self.take(n)
        if self._n_holders > before:
            self.holders[holder] += self.holders.pop(before)

    def find(self, name: bytes) -> None:
        """A new holder of a block found by its name."""
        found = self.pool.find([name])
        assert [self.name_of[block] for block in found] == [name] * (name in self.name_of.values())
        if found:
            self.pool.share(found)
            self.let_go = [block for block in self.let_go if block not in found]
            self.holders[self._n_holders] = found
            self._n_holders += 1

    def name(self, holder: int, name: bytes) -> None:
        """Name the first block of a holder that has none."""
        block = next((block for block in self.holders[holder] if block not in self.name_of), None)
        if block is None:
            return
        self.pool.name(block, name)
        if name not in self.name_of.values():
            self.name_of[block] = name

    def give_back(self, holder: int, n: int) -> None:
        """The last `n` blocks of a holder."""
        blocks = self.holders[holder]
        given, self.holders[holder] = blocks[len(blocks) - n :], blocks[: len(blocks) - n]
        if not self.holders[holder]:
            del self.holders[holder]
        self.pool.give_back(given)
        held = self.held()
        self.let_go += [block for block in reversed(given) if block in self.name_of and block not in held]

    def held(self) -> set[int]:
        """Blocks that somebody holds."""
        return {block for blocks in self.holders.values() for block in blocks}

    def check(self) -> None:
        """Nothing is lost, nothing counted twice."""
        pool, held = self.pool, self.held()
        assert pool.n_held == len(held)
        assert pool.n_kept == len(self.let_go)
        assert pool.n_free == self.n_blocks - len(held) - len(self.let_go)
        assert pool.n_available == pool.n_free + pool.n_kept

    def check_all(self) -> None:
        """As `check`, with the holders of every block counted."""
        self.check()
        counts = [0] * self.n_blocks
        for blocks in self.holders.values():
            for block in blocks:
                counts[block] += 1
        assert [self.pool.n_holders(block) for block in range(self.n_blocks)] == counts

    def empty(self) -> None:
        """Every holder gives back all."""
        for holder in list(self.holders):
            self.give_back(holder, len(self.holders[holder]))
        self.check_all()
        assert self.pool.n_available == self.n_blocks


NAMES = [sha256(bytes([i])).digest() for i in range(40)]


def run_operations(n: int, seed: int, n_blocks: int) -> None:
    """`n` random operations."""
    draw, ledger = random.Random(seed), Ledger(n_blocks)
    for i in range(n):
        operation, holders = draw.random(), list(ledger.holders)
        if operation < 0.25 or not holders:
            ledger.take(draw.randint(0, max(1, n_blocks // 3)))
        elif operation < 0.45:
            ledger.grow(draw.choice(holders), draw.randint(1, 2))
        elif operation < 0.6:
            ledger.name(draw.choice(holders), draw.choice(NAMES))
        elif operation < 0.75:
            ledger.find(draw.choice(NAMES))
        else:
            holder = draw.choice(holders)
            most = len(ledger.holders[holder])
            ledger.give_back(holder, draw.choice([most, min(1, most)]))
        ledger.check()
        if i % 97 == 0:
            ledger.check_all()
    assert ledger.pool.n_evicted > n // 500, "nothing was ever thrown away"
    ledger.empty()


def test_ten_thousand_random_operations_leave_no_block_lost_or_owned_twice() -> None:
    for seed, n_blocks in enumerate((1, 7, 24, 60)):
        run_operations(2_500, seed, n_blocks)


@pytest.mark.slow
def test_a_million_random_operations_leave_no_block_lost_or_owned_twice() -> None:
    for seed, n_blocks in enumerate((1, 3, 17, 40, 90)):
        run_operations(200_000, 10 + seed, n_blocks)


class Operations(RuleBasedStateMachine):
    """The same, with the orders that hypothesis finds."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(9)

    @rule(n=st.integers(0, 10))
    def take(self, n: int) -> None:
        self.ledger.take(n)

    @precondition(lambda self: self.ledger.holders)
    @rule(which=st.integers(0, 99), n=st.integers(1, 3))
    def grow(self, which: int, n: int) -> None:
        self.ledger.grow(self.holder(which), n)

    @rule(which=st.integers(0, 3))
    def find(self, which: int) -> None:
        self.ledger.find(NAMES[which])

    @precondition(lambda self: self.ledger.holders)
    @rule(which=st.integers(0, 99), name=st.integers(0, 3))
    def name(self, which: int, name: int) -> None:
        self.ledger.name(self.holder(which), NAMES[name])

    @precondition(lambda self: self.ledger.holders)
    @rule(which=st.integers(0, 99), n=st.integers(0, 9))
    def give_back(self, which: int, n: int) -> None:
        holder = self.holder(which)
        self.ledger.give_back(holder, min(n, len(self.ledger.holders[holder])))

    def holder(self, which: int) -> int:
        return list(self.ledger.holders)[which % len(self.ledger.holders)]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.ledger.check_all()

    def teardown(self) -> None:
        self.ledger.empty()


def test_any_order_of_operations_leaves_no_block_lost_or_owned_twice() -> None:
    run_state_machine_as_test(Operations, settings=settings(max_examples=60, stateful_step_count=40))


def test_the_last_blocks_of_a_text_are_thrown_away_first() -> None:
    pool = BlockPool(4)
    taken = pool.take(3)
    assert taken == [0, 1, 2]
    for block, name in zip(taken, NAMES, strict=False):
        pool.name(block, name)
    pool.give_back(taken)
    assert (pool.n_free, pool.n_kept) == (1, 3)
    pool.take(2)
    assert pool.find(NAMES[:3]) == [0, 1]


def test_what_is_free_or_held_by_nobody_is_neither_shared_nor_given_back_nor_named() -> None:
    pool = BlockPool(2)
    for wrong in (lambda: pool.share([0]), lambda: pool.give_back([0]), lambda: pool.name(0, NAMES[0])):
        with pytest.raises(InvariantViolated, match="cache block 0"):
            wrong()
    pool.take(1)
    pool.name(0, NAMES[0])
    pool.name(0, NAMES[0])
    with pytest.raises(InvariantViolated, match="named again"):
        pool.name(0, NAMES[1])


@given(
    st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20), st.integers(1, 4),
    st.integers(0, 1),
)  # fmt: skip
def test_names_are_equal_exactly_where_the_texts_up_to_the_blocks_end_are(
    one: list[int], other: list[int], block: int, ahead: int
) -> None:
    names: list[list[bytes]] = [[], []]
    for mine, text in zip(names, (one, other), strict=True):
        for end in range(len(text) + 1):  # token by token, as a request gets them
            extend_names(mine, text[:end], block, ahead)
        assert len(mine) == max(0, (len(text) - ahead) // block)
        at_once: list[bytes] = []
        extend_names(at_once, text, block, ahead)
        assert mine == at_once
    for i, (mine, theirs) in enumerate(zip(*names, strict=False)):
        end = (i + 1) * block + ahead
        assert (mine == theirs) == (one[:end] == other[:end])
