"""What passes between host and device beside a program: results on their way to the host; drafts and prompts given.

The device writes results straight to the host's pinned memory, blocks in turn: a copy between two steps would keep the
GPU waiting for several microseconds. An event behind each says when it is there; they are read one step behind, or at
once where the host makes the drafts, which begin with the newest tokens. Source: docs/requirements.md R-02, R-90.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3core.cache import Copy
from eagle3core.errors import InvariantViolated
from eagle3core.kernels.slots.slot_state import MOST_ENDS, N_REQUEST, N_SPAN
from eagle3core.step.admission import Part
from eagle3core.step.buffers import rows_of
from eagle3core.step.sizes import ChunkShape, DeviceSizes

NO_TOKEN = -1  # of a node without a draft: its row embeds as zeros, and the target never chooses it


class Sent(NamedTuple):
    """A block under way: what filled it (an admission, or the step of that number), its turn and rows, whether
    log-probabilities lie beside it, the kind of the step, and the mark of its end; `is_next`: nothing else ran since
    the block before."""

    step: int | None
    turn: int
    n_rows: int
    logprobs: bool = False
    kind: int | None = None
    mark: int = 0
    is_next: bool = False


class ResultQueue:
    """Blocks under way, first in, first out; as many as there are.

    Args:
        blocks: `[n, S, W]` int32, for kernels in the host's memory; the first program that runs after this writes block
            1, the next one block 2, and so on, beginning again at 0.
        device: what writes them, on its current stream, whichever GPU is current; on the CPU they are there at once.
        is_timed: whether the time between two blocks is wanted.
    """

    def __init__(self, blocks: Tensor, device: torch.device, *, is_timed: bool = False) -> None:
        self._blocks, self._device, self._is_timed = list(blocks), device, is_timed
        # A mark outlasts the reading of the block behind it; those that wait are read one behind.
        n = len(self._blocks) + 2
        is_cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=is_timed) for _ in range(n)] if is_cuda else []  # type: ignore[no-untyped-call]
        self._clock = [0.0] * n
        self._turn = self._mark = 0
        self._sent: deque[Sent] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def send(
        self, n_rows: int, step: int | None, *, logprobs: bool = False, kind: int | None = None, is_next: bool = False
    ) -> None:
        """Note that the program just enqueued, an admission or a step, writes `n_rows` rows of the next block.

        Raises:
            InvariantViolated: all blocks are under way already, so that it overwrites one that nobody has read.
        """
        if len(self._sent) == len(self._blocks):
            raise InvariantViolated(
                f"{len(self._blocks)} results are under way already", "one step behind", "collect after every step"
            )
        self._turn = (self._turn + 1) % len(self._blocks)
        self._mark = (self._mark + 1) % len(self._clock)
        if self._events:
            self._events[self._mark].record(torch.cuda.current_stream(self._device.index))
        elif self._is_timed:
            self._clock[self._mark] = time.perf_counter()
        self._sent.append(Sent(step, self._turn, n_rows, logprobs, kind, self._mark, is_next))

    def receive(self) -> tuple[Sent, list[list[int]]]:
        """Wait for the oldest block: what it was sent as, and its rows."""
        sent = self._sent.popleft()
        if self._events:
            self._events[sent.mark].synchronize()
        rows: list[list[int]] = self._blocks[sent.turn][: sent.n_rows].tolist()
        return sent, rows

    def took_us(self, sent: Sent) -> float | None:
        """From the block before to this one, which has been received; None where other work lay between, or nobody
        asked. Both ends are past, so this waits for nothing."""
        if not (self._is_timed and sent.is_next):
            return None
        before = (sent.mark - 1) % len(self._clock)
        if self._events:
            return 1e3 * float(self._events[before].elapsed_time(self._events[sent.mark]))
        return 1e6 * (self._clock[sent.mark] - self._clock[before])

    def forget(self) -> None:
        """Drop what is under way and begin as a new queue does; the device has to begin at block 0 as well."""
        self._sent.clear()
        self._turn = 0


class GivenDrafts:
    """Tokens of the nodes behind the root, written where a step's program looks for them, before it runs.

    The copy is enqueued in the order of the stream, so it comes after the step before and before the one it is for. Its
    source is written again only when the results of that step have been read, hence after the copy.

    Args:
        drafted: `[n_nodes * S]` int32 on the device, of which a step of B rows reads `[n_nodes, B]`, the roots first.
        n_nodes: of the tree, the root included. results: of the steps.
    """

    def __init__(self, drafted: Tensor, n_nodes: int, results: ResultQueue) -> None:
        self._drafted, self._n_nodes, self._results = drafted, n_nodes, results
        self._host = torch.empty(drafted.shape, dtype=torch.int32, pin_memory=drafted.device.type == "cuda")

    def write(self, drafts: Mapping[int, Sequence[int]], batch: int) -> None:
        """Drafts by slot for a step of `batch` rows; nodes that get none, and rows past the slots', hold no token.

        Raises:
            InvariantViolated: results are under way, so that the newest tokens are not known, nor the last copy's end.
        """
        if self._results:
            raise InvariantViolated(
                f"drafts were given with {len(self._results)} results under way",
                "drafts that follow the newest tokens",
                "make the runner with n_behind=0, and collect after every step",
            )
        n = self._n_nodes - 1
        rows = [drafts[slot] for slot in sorted(drafts)]  # as a step orders its slots
        host = rows_of(self._host, n, batch)
        padded = [[*row[:n], *[NO_TOKEN] * (n - len(row))] for row in rows]
        padded += [[NO_TOKEN] * n] * (batch - len(rows))
        host.copy_(torch.tensor(padded, dtype=torch.int32).T)
        rows_of(self._drafted, n + 1, batch)[1:].copy_(host, non_blocking=True)


class Staging:
    """Host memory that copies to the device are made from, so that the host waits for none that it has just enqueued.

    Two tensors in turn, pinned for a GPU; one is written again when the work that was enqueued in its last turn is
    over, so the host waits for the turn before last at most.

    Args:
        n_numbers: int32 of a turn, at most.
    """

    def __init__(self, n_numbers: int, device: torch.device) -> None:
        self._device, is_cuda = device, device.type == "cuda"
        self._hosts = [torch.empty(n_numbers, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)]
        self._numbers = [host.numpy().data for host in self._hosts]
        self._over = [torch.cuda.Event() for _ in range(2)] if is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = self._at = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around copies and the work that they are for."""
        self._turn, self._at = 1 - self._turn, 0
        if self._over:
            self._over[self._turn].synchronize()
        try:
            yield
        finally:
            if self._over:
                self._over[self._turn].record(torch.cuda.current_stream(self._device.index))

    def copy(self, to: Tensor, numbers: array[int] | memoryview[int]) -> None:
        """Enqueue a copy of `numbers` to a tensor of as many on the device, inside a turn; they may change then."""
        at, self._at = self._at, self._at + len(numbers)
        assert self._at <= len(self._hosts[0]), "a turn has room for what a pass is told"
        self._numbers[self._turn][at : self._at] = numbers
        to.copy_(self._hosts[self._turn][at : self._at], non_blocking=True)


class GivenPass(NamedTuple):
    """What a pass over prompts is told, int32, one behind the other in one tensor; all but the last two have fixed
    places.

    Attributes:
        requests: `[N_REQUEST, E]` whose prompts end in it. ends: `[E, MOST_ENDS]` theirs.
        last_spans: `[N_SPAN, E]`, last_tokens: `[E, 2]`: the last token of each as a span of its own.
        spans: `[N_SPAN, n]`. tokens: `[n, T + 1]` of each span, and the one that follows; -1 where there is none.
    """

    requests: Tensor
    ends: Tensor
    last_spans: Tensor
    last_tokens: Tensor
    spans: Tensor
    tokens: Tensor


def given_numbers(sizes: DeviceSizes) -> int:
    """Numbers of the largest pass of any shape."""
    return sizes.n_ends * (N_REQUEST + MOST_ENDS + N_SPAN + 2) + sizes.n_spans * (N_SPAN + 1) + sizes.chunk


def given_pass(numbers: Tensor, n_ends: int, shape: ChunkShape) -> GivenPass:
    """The tables of a pass of a shape."""
    tables, at = [], 0
    of_ends = ((N_REQUEST, n_ends), (n_ends, MOST_ENDS), (N_SPAN, n_ends), (n_ends, 2))
    for size in (*of_ends, (N_SPAN, shape.spans), (shape.spans, shape.tokens + 1)):
        tables.append(rows_of(numbers[at:], *size))
        at += size[0] * size[1]
    return GivenPass(*tables)


class GivenPrompts:
    """Tells the device what each pass over prompts works on, in one copy, just before the pass is enqueued.

    Args:
        numbers: `[given_numbers]` int32 on the device. shapes: of all passes. copy: enqueues a copy of numbers to it.
    """

    def __init__(self, numbers: Tensor, sizes: DeviceSizes, shapes: Iterable[ChunkShape], copy: Copy) -> None:
        self._numbers, self._n_ends, self._seed_row, self._copy = numbers, sizes.n_ends, sizes.seed_row, copy
        self._none = array("i", [NO_TOKEN]) * len(numbers)
        host = torch.empty(numbers.shape, dtype=torch.int32)
        self._flat = host.numpy().data
        self._tables = {
            shape: [table.view(-1).numpy().data for table in given_pass(host, sizes.n_ends, shape)] for shape in shapes
        }

    def write(self, parts: Sequence[Part], shape: ChunkShape) -> None:
        """The spans of `parts`, in a pass of `shape` that holds them, and the requests whose prompts end."""
        self._flat[:] = self._none
        requests, ends, last_spans, last_tokens, spans, tokens = self._tables[shape]  # each row by row
        width, row, n_ended = shape.tokens + 1, 0, 0
        for reading, n in parts:
            slot, request, last = reading.slot, reading.request, reading.n_read + n
            for at in range(reading.n_read, last, shape.tokens):
                held = request.numbers[at : at + width]
                spans[row :: shape.spans] = array("i", (slot, at, request.id))
                tokens[row * width : row * width + len(held)] = held
                row += 1
            if n == reading.n_left:
                last_row, seed = row * shape.tokens - (-n % shape.tokens) - 1, self._seed_row + slot
                asked = (slot, last, request.budget, 0, request.id, last_row, seed, request.most_drafts)
                requests[n_ended :: self._n_ends] = array("i", asked)
                own = array("i", request.ends[:MOST_ENDS])
                ends[n_ended * MOST_ENDS : n_ended * MOST_ENDS + len(own)] = own
                last_spans[n_ended :: self._n_ends] = array("i", (slot, last - 1, request.id))
                last_tokens[2 * n_ended] = request.numbers[last - 1]
                n_ended += 1
        self._copy(self._numbers, self._flat)
