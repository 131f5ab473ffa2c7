"""The runner: programs replayed, results read, nothing allocated on the way.

On a GPU a step is one graph replay, which writes its results to the host's memory, and one event; the host waits for
the event of the step before. The device stops a slot by itself at an end token or at the budget; whatever else ends a
request is found by the host, on a GPU a step late. Every result row carries the id of its request, so whoever reads it
knows whose it is; the runner keeps no book of requests. Source: docs/requirements.md R-25, R-26, R-86..R-92, R-113(6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from eagle3core.cache import BlockTables
from eagle3core.kernels.gemm.scratch import workspace, workspace_bytes
from eagle3core.kernels.slots.slot_state import RUNNING
from eagle3core.step.admission import Reading, SlotRequest, parts_of_pass
from eagle3core.step.depths import Unread, kinds_of
from eagle3core.step.depths.programs import StepPrograms
from eagle3core.step.depths.timing import Times, times_of
from eagle3core.step.draw import GivenDraws
from eagle3core.step.gemm_audit import audit, products_of
from eagle3core.step.outcome import Outcome
from eagle3core.step.passes import Emitter
from eagle3core.step.prefill import chunk_program, draft_chunk_program, finish_program
from eagle3core.step.program import Program
from eagle3core.step.received import OutcomeReader
from eagle3core.step.replay import CapturedPrograms, Replayer
from eagle3core.step.results import GivenDrafts, GivenPrompts, ResultQueue, Staging, given_numbers
from eagle3core.step.sizes import ChunkShape, DeviceSizes, StateShape, buckets, chunk_shapes, largest_pass
from eagle3core.step.state import DeviceState, new_device_state
from eagle3core.trace import Trace
from eagle3core.weights.packed import Drafter, PackedTarget

log = logging.getLogger("eagle3core")


class DeviceRunner:
    """Runs models on their device.

    Args:
        arch: compile target of the kernels; None where programs run by their meaning.
        replayer: how programs are run.
        order: (splits, streams) of attention, or None for the architecture's own.
        n_behind: newest results that are left unread, so that the host waits for nothing; 1 on a GPU, else 0.

    Attributes:
        n_slots: sequences at once. depth: drafts on the longest path. n_drafts: drafts of a step, at most.
        kinds: of steps, by number. steps: their programs.
        chunks: programs of a pass over prompts, by shape; smallest first. finish: follows one in which prompts end.
        draft_chunks: by shape, the draft's pass over the same tokens, last of all; empty where no draft reads.
        gemms: the matrix products of all programs; none where no kernels run.
        tables: which blocks the slots' rows lie in.
    """

    def __init__(
        self,
        target: PackedTarget,
        draft: Drafter | None,
        sizes: DeviceSizes,
        *,
        arch: str | None,
        replayer: Replayer,
        order: tuple[int, int] | None = None,
        n_behind: int | None = None,
    ) -> None:
        self.target, self.draft, self.sizes = target, draft, sizes
        self.n_slots, self.depth, self.n_drafts = sizes.n_slots, sizes.path_len - 1, sizes.nodes - 1
        self.n_behind = n_behind if n_behind is not None else int(target.device.type == "cuda")
        shape = StateShape(target.geometry, draft.geometry if draft else None, target.dtype, target.device)
        self.state: DeviceState = new_device_state(arch, shape, sizes, order)
        told = (self.state.tables, self.state.draws.rows)  # a row of each, of every prompt that a pass begins
        n_told = given_numbers(sizes) + sizes.n_ends * sum(rows.shape[1] for rows in told)
        self._staging = Staging(n_told, target.device)
        self.tables = BlockTables(self.state.tables, self.state.pages, self._staging.copy)
        self._draws = GivenDraws(self.state.draws, self._staging.copy)
        n_bytes = workspace_bytes(sizes.most_rows, shape.most_columns)
        self.emit = Emitter(arch, order, workspace(target.device, n_bytes) if arch is not None else None, target.dtype)
        models = (self.emit, target, draft, self.state)
        self.kinds = kinds_of(sizes, draft)
        self.steps = StepPrograms(models, self.kinds, buckets(sizes), sizes)
        shapes = chunk_shapes(sizes, kernels=arch is not None)
        self.chunks = {shape: chunk_program(self.emit, target, self.state, shape) for shape in shapes}
        self.draft_chunks = {shape: draft_chunk_program(self.emit, draft, self.state, shape) for shape in shapes}
        self.finish = finish_program(*models)
        self.gemms = audit(arch, self.all_programs)
        self._unread = Unread(self.kinds, sizes.n_kept)
        self._is_next = False  # whether the newest result is that of a step, and nothing was enqueued since
        self._captured = CapturedPrograms(replayer)
        self._results = ResultQueue(self.state.results, target.device, is_timed=sizes.n_kept > 0)
        self._outcomes = OutcomeReader(self._results, self.state, sizes, self.kinds, self.steps)
        self._given = GivenDrafts(self.state.step.drafted, sizes.nodes, self._results)
        self._prompts = GivenPrompts(self.state.given, sizes, shapes, self._staging.copy)

    @property
    def has_kernels(self) -> bool:
        """Whether programs are kernels, not their meaning alone."""
        return self.emit.arch is not None

    @property
    def replayer(self) -> Replayer:
        """How programs are run."""
        return self._captured.replayer

    @property
    def programs(self) -> dict[int, Program]:
        """The steps of the whole depth, by rows."""
        return self.steps.by_kind[self.depth]

    @property
    def all_programs(self) -> tuple[Program, ...]:
        """Every program: passes over prompts, the ends of prompts, steps."""
        return (*self.reading, *self.steps.all)

    @property
    def reading(self) -> tuple[Program, ...]:
        """Every program that reads prompts."""
        drafts = (program for program in self.draft_chunks.values() if program)
        return (*self.chunks.values(), self.finish, *drafts)

    @property
    def n_under_way(self) -> int:
        """Results of admissions and steps that have not been collected."""
        return len(self._results)

    def prepare(self, trace: Trace | None = None) -> None:
        """Compile, load and capture every program now, so that no step has to (`CapturedPrograms.prepare`)."""
        self._captured.prepare(self.all_programs, self.target.device, self.emit.arch, trace or Trace())

    def keep_tuned_passes(self) -> None:
        """Read prompts by the largest pass and those others of which a tuned file, where there is one, knows all."""
        missed, largest = set(self.gemms.misses), self.largest_pass()
        known = {
            shape for shape, program in self.chunks.items()
            if missed.isdisjoint((*products_of(program), *products_of(self.draft_chunks[shape])))
        }  # fmt: skip
        if left_out := sorted(shape.rows for shape in self.chunks.keys() - known - {largest}):
            log.warning("[EAGLE] no passes of %s rows, whose products are not in the tuned file", left_out)
            self.chunks = {shape: program for shape, program in self.chunks.items() if shape in known | {largest}}
            self.draft_chunks = {shape: self.draft_chunks[shape] for shape in self.chunks}
            self.gemms = audit(self.emit.arch, self.all_programs)

    def replay_by(self, replayer: Replayer) -> None:
        """Run programs by `replayer` from now on; what was captured before is dropped."""
        self._captured = CapturedPrograms(replayer)

    def change_programs(self, change: Callable[[Program], Program]) -> None:
        """Run `change(program)` in place of every program from now on, for one that is to differ on purpose."""
        self.chunks = {shape: change(program) for shape, program in self.chunks.items()}
        self.draft_chunks = {shape: change(program) for shape, program in self.draft_chunks.items()}
        self.finish = change(self.finish)
        self.steps.change(change)
        self.replay_by(self.replayer)

    def begin(self, slot: int, request: SlotRequest) -> Reading:
        """A prompt for an empty slot, which `read_on` then reads; the slot takes part in no step meanwhile.

        The device is told of it with its first pass. One that is given up needs no word: the slot's next takes its
        place.
        """
        return Reading(slot, request, request.n_cached)

    def largest_pass(self, most_rows: float | None = None) -> ChunkShape:
        """The largest pass over prompts of at most so many rows (None: of any), or the smallest of whole spans."""
        return largest_pass(self.chunks, self.sizes.span, most_rows)

    def read_on(self, readings: Sequence[Reading], trace: Trace, largest: ChunkShape | None = None) -> int:
        """One pass over prompts, first come first served as far as its spans go; where prompts end in it, sample their
        first tokens, and their slots take part from the next step on. The smallest pass that holds what is read. The
        draft reads the same tokens after that, which no first token waits for.

        Belongs inside the scope "prefill" of the trace.

        Args:
            largest: of `largest_pass`, None for that of any number of rows.

        Returns:
            rows of the pass, padding included.
        """
        parts, shape = parts_of_pass(readings, list(self.chunks), largest or self.largest_pass())
        self._is_next = False
        with self._staging.turn():
            for reading, _ in parts:
                if reading.is_new:
                    self._prepare_slot(reading.slot, reading.request)
            self._prompts.write(parts, shape)
            self._captured.run(self.chunks[shape], trace)
        for reading, n in parts:
            reading.n_read += n
        ended = [reading.request for reading, _ in parts if reading.is_done]
        if ended:
            asks = any(one.sampling is not None for one in ended), any(one.logprobs for one in ended)
            # The end reads buffers that a step would overwrite, so it follows its pass at once.
            self._captured.run(self.steps.finish(*asks) if any(asks) else self.finish, trace)
            self._results.send(len(ended), None, logprobs=asks[1])
        if reads := self.draft_chunks[shape]:
            self._captured.run(reads, trace)
        return shape.rows

    def _prepare_slot(self, slot: int, request: SlotRequest) -> None:
        """Make an empty slot ready for a prompt's first pass."""
        blocks = self.tables.own_blocks(slot) if request.blocks is None else request.blocks
        self.tables.assign(slot, blocks, request.n_cached // self.sizes.block)
        self._draws.write(slot, request.sampling, request.first)

    def admit(self, slot: int, request: SlotRequest, trace: Trace) -> None:
        """Read a whole prompt into an empty slot and sample its first token; the slot then takes part in steps."""
        reading = self.begin(slot, request)
        with trace.scope("prefill"):
            while not reading.is_done:
                self.read_on([reading], trace)

    def batch_of(self, n_running: int) -> int:
        """Rows of the program for a step of `n_running` slots, each with its nodes."""
        return next(n for n in self.programs if n >= n_running)

    def kind_for(self, depth: int | None) -> int:
        """The kind of step that runs next if `depth` drafts are wanted (None: all). Without drafts where the draft has
        too much to read first."""
        return self.depth if depth is None else self._unread.kind_for(depth)

    def rows_of_step(self, n_running: int, kind: int | None = None) -> int:
        """Rows that the target verifies in a step of `n_running` slots, those of the program's padding included."""
        return self.batch_of(n_running) * self.kinds[self.depth if kind is None else kind].tree.n_nodes

    def time_steps(self) -> Times:
        """Microseconds by (drafts, rows) of steps over empty slots; before anything is admitted. Empty on a CPU."""
        steps = {
            (kind, n): self._captured.enqueue_of(program)
            for kind, by_rows in self.steps.by_kind.items() for n, program in by_rows.items()
        }  # fmt: skip
        times = times_of(steps, self.target.device, self.sizes.n_kept)
        self.state.turn.zero_()
        return times

    def ready(
        self, n_running: int, trace: Trace, *, draws: bool = False, logprobs: bool = False, depth: int | None = None
    ) -> None:
        """Capture what `enqueue` will run, unless it is: a clock around the step is not to see that."""
        program = self.steps.of(self.kind_for(depth), self.batch_of(n_running), draws, logprobs)
        self._captured.ready(program, trace)

    def write_drafts(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Drafts of the next step by slot, of every slot that runs; for a runner without a draft model."""
        self._given.write(drafts, self.batch_of(len(drafts)))

    def enqueue(
        self, n_running: int, step: int, trace: Trace, *, draws: bool = False, logprobs: bool = False,
        depth: int | None = None,
    ) -> None:  # fmt: skip
        """Advance every running slot by a step, of which there are at most `n_running`; `draws`: some draw tokens,
        `logprobs`: some ask for those; `depth`: drafts that are wanted, None for all (`kind_for`)."""
        kind = self.kind_for(depth)
        self._captured.run(self.steps.of(kind, self.batch_of(n_running), draws, logprobs), trace)
        self._results.send(self.batch_of(n_running), step, logprobs=logprobs, kind=kind, is_next=self._is_next)
        self._unread.ran(kind)
        self._is_next = True

    def collect(self, *, everything: bool) -> list[Outcome]:
        """Outcomes in the order of the work. Without `everything`, only those that need no waiting for the newest."""
        outcomes = []
        while len(self._results) > (0 if everything else self.n_behind):
            outcomes.append(self._outcomes.receive())
        return outcomes

    def release(self, slot: int) -> None:
        """Stop a slot that does not stop by itself; what is enqueued after this may fill it again."""
        self.state.state[RUNNING, slot : slot + 1].zero_()

    def abandon(self) -> None:
        """Empty every slot and forget what is under way, be it of a step that broke off half-way."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        self._results.forget()
        self._unread.forget()
        self._is_next = False
        self.state.state[RUNNING].zero_()
        self.state.turn.zero_()  # where the host's count begins again; half a step may have moved it
