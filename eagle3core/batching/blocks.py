"""Which request holds which blocks of the cache, and what a step needs before it may be enqueued.

A request gets blocks as its prompt is begun: all that it may come to need, where everybody's fit what is empty, so that
no step has a block cleared before it; else those of its prompt and a step's rows, more as it grows. It gives them back
at its end, or when it is put back because they ran out. On a GPU the host knows lengths a step late, so it counts with
the longest that the steps under way can make them; what goes beyond is given back where blocks are short.

With a prefix cache a request begins with the blocks of others whose text its own begins with, and only reads them:
whatever is written for it lies at or behind the last token of what it reads, and a block is shared only where that
token is not in it. A block is named, for others to find, once both models' rows in it are final.
Source: Kwon et al., arXiv 2309.06180, sections 4.4 and 4.5; docs/requirements.md R-64, R-65, R-67..R-69.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from eagle3core.batching import step_log
from eagle3core.cache import BlockPool, extend_names
from eagle3core.errors import ConfigError, InvariantViolated
from eagle3core.request import Request
from eagle3core.step.run import DeviceRunner
from eagle3core.step.sizes import blocks_for
from eagle3core.weights.packed import PackedDraft


@dataclass
class Holding:
    """What a request holds.

    Attributes:
        n_known: tokens in the target's cache before the step number `as_of`; later steps may have added to them.
        n_final: tokens of these whose rows no step writes any more, of the draft neither.
        is_sound: no step has reported a fault.
        blocks: in the order of its tokens. n_room: most tokens in the cache before a step whose rows they hold.
        n_named: of the blocks, the first that were named or found by name. n_most: blocks that it may come to hold.
    """

    n_known: int
    as_of: int = 0
    n_final: int = 0
    is_sound: bool = True
    blocks: list[int] = field(default_factory=list)
    n_room: int = 0
    n_named: int = 0
    n_most: int = 0


@dataclass
class CacheCounts:
    """What happened to the cache's blocks since the engine was made.

    Attributes:
        n_taken, n_given_back: blocks that requests took and gave back.
        n_rewound: of those given back, the ones held for tokens that had not come: drafts that were not accepted, or
            what a request may still have grown to.
        n_put_back: requests that were put back because blocks ran out.
        n_found_tokens: tokens that were not read, since their blocks were found.
    """

    n_taken: int = 0
    n_given_back: int = 0
    n_rewound: int = 0
    n_put_back: int = 0
    n_found_tokens: int = 0


class CacheBlocks:
    """The account of blocks by request id.

    Args:
        runner: whose tables are written. keeps: whether full blocks are kept for others to find.

    Attributes:
        pool: who holds which block. counts: what happened so far.
    """

    def __init__(self, runner: DeviceRunner, *, keeps: bool) -> None:
        self._tables, self._sizes = runner.tables, runner.sizes
        self.pool, self.counts = BlockPool(runner.sizes.n_blocks), CacheCounts()
        self._path_len, self._keeps = runner.sizes.path_len, keeps
        self._ahead = int(isinstance(runner.draft, PackedDraft))  # a head's row is made of the next token as well
        self._held: dict[int, Holding] = {}

    def check_fits(self, index: int, request: Request) -> None:
        """Refuse a request that all blocks together do not hold; `index` is its prompt's, as errors name it.

        Raises:
            ConfigError: it would be put back for ever.
        """
        n_blocks = self._blocks_for(self._most_rows(request))
        if n_blocks > self.pool.n_blocks:
            raise ConfigError(
                f"prompt {index} has {len(request.prompt)} tokens and may get {request.stop.limit}, which takes "
                f"{n_blocks} cache blocks",
                f"at most {self.pool.n_blocks}, all that the cache has",
                "lower max_new_tokens, shorten the prompt, or raise cache_blocks or cache_max_entry_count",
            )

    def has_room(self, request: Request, running: Collection[Request], step: int) -> bool:
        """Whether a request that waits may be begun, and each of the others that may need a block more could take it.

        Where it may not, those that run give back what the step of that number does not need.

        Raises:
            InvariantViolated: it may not, and there is nobody to wait for.
        """
        if self._is_room(request) or (self.rewind(running, step) and self._is_room(request)):
            return True
        if not self._held:
            raise InvariantViolated(
                f"request {request.id} wants more cache blocks than {self.pool.n_available} with nobody running",
                "a request that fits alone",
                "report this: the account of blocks is wrong",
            )
        return False

    def _is_room(self, request: Request) -> bool:
        found = self._found(request)
        n_wanted = self._blocks_for(self._first_rows(request)) - len(found)
        n_growing = sum(len(held.blocks) < held.n_most for held in self._held.values())
        return n_wanted + n_growing <= self.pool.n_takeable(found)

    def begin(self, request: Request) -> tuple[list[int], int]:
        """Blocks for the request's tokens so far and a step, and how many of these tokens need not be read.

        There is room for them.
        """
        found = self._found(request)
        self.pool.share(found)
        n_first, n_most = self._blocks_for(self._first_rows(request)), self._blocks_for(self._most_rows(request))
        n_of_others = sum(held.n_most - len(held.blocks) for held in self._held.values())
        has_plenty = n_most - len(found) + n_of_others <= self.pool.n_free
        taken = self._take(request, (n_most if has_plenty else n_first) - len(found))
        assert taken is not None, "a request is begun only where there is room"
        self._held[request.id] = held = Holding(_n_tokens(request), n_named=len(found), n_most=n_most)
        self._hold(held, [*found, *taken])
        n_cached = len(found) * self._sizes.block
        self.counts.n_taken += len(found)
        self.counts.n_found_tokens += n_cached
        if not request.n_put_back:
            request.n_cached = n_cached
        return held.blocks, n_cached

    def runs(self, request: Request, step: int) -> None:
        """Note that all tokens of the request have been read, and that it takes part in steps from that number on."""
        held = self._held[request.id]
        held.as_of, held.n_final = step, held.n_known - 1  # the draft's row of the last token is yet to come
        self._name(request, held)

    def committed(self, request: Request, step: int, n: int, *, is_sound: bool, reads: bool = True) -> None:
        """Note that the step of that number added `n` tokens to the request's cache, with a fault or without;
        `reads`: its draft read what waited for it."""
        held = self._held[request.id]
        # The step's first pass gave the draft its rows of what was there; those of the new tokens come with the next.
        held.n_final = held.n_known if reads else held.n_final
        held.n_known += n
        held.as_of = step + 1
        held.is_sound &= is_sound

    def grow(self, request: Request, step: int) -> bool:
        """Hold what the step of that number may write; False, and nothing changed, where there are too few blocks."""
        held = self._held[request.id]
        if held.n_known + (step - held.as_of) * self._path_len <= held.n_room:
            return True  # as nearly always: a block lasts for many steps
        n_more = self._wanted(request, held, step) - len(held.blocks)
        if n_more <= 0:
            return True
        taken = self._take(request, n_more)
        if taken is None:
            return False
        self._tables.extend(request.slot, len(held.blocks), taken)
        self._hold(held, [*held.blocks, *taken])
        return True

    def rewind(self, requests: Iterable[Request], step: int) -> bool:
        """Give back what the step of that number does not need, blocks for tokens that have not come; whether any."""
        before = self.counts.n_rewound
        for request in requests:
            held = self._held[request.id]
            n_kept = self._wanted(request, held, step)
            if n_kept < len(held.blocks):
                self._tables.cut(request.slot, n_kept)
                self._give_back(request, held.blocks[n_kept:])
                self.counts.n_rewound += len(held.blocks) - n_kept
                self._hold(held, held.blocks[:n_kept])
        return self.counts.n_rewound > before

    def release(self, request: Request) -> None:
        """Give back all that a request holds; its slot takes part in nothing that is enqueued from now on."""
        held = self._held.pop(request.id)
        if held.is_sound and request.error is None:
            self._name(request, held)
        self._give_back(request, held.blocks)

    def forget(self) -> None:
        """Nobody holds anything, and what is in the blocks means nothing."""
        self._held.clear()
        self.pool = BlockPool(self.pool.n_blocks)

    def _found(self, request: Request) -> list[int]:
        """Blocks that hold what the request begins with, without its last token, which is read in any case."""
        if not self._keeps:
            return []
        return self.pool.find(self._names_of(request)[: (_n_tokens(request) - 1) // self._sizes.block])

    def _name(self, request: Request, held: Holding) -> None:
        """Name the request's blocks whose rows are final."""
        if not self._keeps:
            return
        n_final = held.n_final // self._sizes.block
        for i in range(held.n_named, n_final):
            self.pool.name(held.blocks[i], self._names_of(request)[i])
        held.n_named = max(held.n_named, n_final)

    def _names_of(self, request: Request) -> list[bytes]:
        """Names of all blocks that the request's tokens so far complete."""
        block = self._sizes.block
        if len(request.names) < (_n_tokens(request) - self._ahead) // block:
            extend_names(request.names, [*request.prompt, *request.token_ids], block, self._ahead)
        return request.names

    def _hold(self, held: Holding, blocks: list[int]) -> None:
        held.blocks, held.n_room = blocks, len(blocks) * self._sizes.block - self._sizes.in_flight

    def _wanted(self, request: Request, held: Holding, step: int) -> int:
        """Blocks for the rows that the step may write, after as much as the steps under way can have committed."""
        sizes = self._sizes
        longest = held.n_known + (step - held.as_of) * self._path_len + sizes.in_flight
        return self._blocks_for(min(longest, self._most_rows(request)))

    def _first_rows(self, request: Request) -> int:
        """Rows of the tokens that are read and of a step after them."""
        return min(_n_tokens(request) + self._sizes.in_flight, self._most_rows(request))

    def _most_rows(self, request: Request) -> int:
        """Rows of the longest that the request may become, and of its last step."""
        return len(request.prompt) + request.stop.limit - 1 + self._sizes.in_flight

    def _blocks_for(self, n_rows: int) -> int:
        return blocks_for(n_rows, self._sizes.block)

    def _take(self, request: Request, n: int) -> list[int] | None:
        taken = self.pool.take(n)
        if taken is not None:
            self.counts.n_taken += n
            step_log.log_blocks("takes", request.id, request.slot, taken, self.pool)
        return taken

    def _give_back(self, request: Request, blocks: list[int]) -> None:
        self.pool.give_back(blocks)
        self._tables.clean(block for block in blocks if self.pool.is_free(block))
        self.counts.n_given_back += len(blocks)
        step_log.log_blocks("gives back", request.id, request.slot, blocks, self.pool)


def _n_tokens(request: Request) -> int:
    """Tokens that are read before the request runs: its prompt, and what it had when it was put back."""
    return len(request.prompt) + len(request.token_ids)
