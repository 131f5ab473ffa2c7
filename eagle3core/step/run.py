"""The runner: programs replayed, results read, nothing allocated on the way.

On a GPU a step is one graph replay, which writes its results to the host's memory, and one event; the host waits for
the event of the step before. The device stops a slot by itself at an end token or at the budget; whatever else ends a
request is found by the host, on a GPU a step late. Every result row carries the id of its request, so whoever reads it
knows whose it is; the runner keeps no book of requests. Source: docs/requirements.md R-25, R-26, R-86..R-92, R-113(6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from eagle3core.cache import BlockTables
from eagle3core.kernels.gemm.launcher import workspace, workspace_bytes
from eagle3core.kernels.slots.slot_state import GOES_ON, N_RESULT, NO_CHOICE_LEFT, NOT_FINITE, RUNNING
from eagle3core.step.admission import Reading, SlotRequest, parts_of_pass
from eagle3core.step.build import step_program
from eagle3core.step.draw import set_draws
from eagle3core.step.gemm_audit import audit
from eagle3core.step.outcome import KeptLogprobs, Outcome, RowOutcome, new_kept_logprobs
from eagle3core.step.passes import Emitter
from eagle3core.step.prefill import chunk_program, finish_program
from eagle3core.step.program import Program
from eagle3core.step.replay import Enqueue, Replayer, Staged
from eagle3core.step.results import GivenDrafts, GivenPrompts, ResultQueue, Sent
from eagle3core.step.sizes import DeviceSizes, StateShape, buckets, chunk_shapes
from eagle3core.step.state import DeviceState, new_device_state
from eagle3core.trace import Trace
from eagle3core.weights.packed import Drafter, PackedTarget


class DeviceRunner:
    """Runs models on their device.

    Args:
        arch: compile target of the kernels; None where programs run by their meaning.
        replayer: how programs are run.
        order: (splits, streams) of attention, or None for the architecture's own.
        n_behind: newest results that are left unread, so that the host waits for nothing; 1 on a GPU, else 0.

    Attributes:
        n_slots: sequences at once. depth: drafts on the longest path. n_drafts: drafts of a step.
        chunks: programs of a pass over prompts, by shape; largest last. finish: what follows one in which prompts end.
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
        self.target, self.draft, self.sizes, self.replayer = target, draft, sizes, replayer
        self.n_slots, self.depth, self.n_drafts = sizes.n_slots, sizes.path_len - 1, sizes.nodes - 1
        self.n_behind = n_behind if n_behind is not None else int(target.device.type == "cuda")
        shape = StateShape(target.geometry, draft.geometry if draft else None, target.dtype, target.device)
        self.state: DeviceState = new_device_state(arch, shape, sizes, order)
        self.tables = BlockTables(self.state.tables, self.state.pages)
        n_bytes = workspace_bytes(sizes.most_rows, shape.most_columns)
        self.emit = Emitter(arch, order, workspace(target.device, n_bytes) if arch is not None else None)
        self.programs = {batch: step_program(self.emit, target, draft, self.state, batch) for batch in buckets(sizes)}
        shapes = chunk_shapes(sizes, kernels=arch is not None)
        self.chunks = {shape: chunk_program(self.emit, target, draft, self.state, shape) for shape in shapes}
        self.finish = finish_program(self.emit, target, draft, self.state)
        self.gemms = audit(arch, self.all_programs)
        self._asked: dict[tuple[int | None, bool, bool], Program] = {}  # by batch, None for `finish`; draws; logprobs
        self._logprobs: KeptLogprobs | None = None
        self._change: Callable[[Program], Program] | None = None
        self._whole: dict[int, Enqueue] = {}
        self._staged: dict[int, Staged] = {}
        self._results = ResultQueue(self.state.results, target.device)
        self._given = GivenDrafts(self.state.step.drafted, sizes.nodes, self._results)
        self._prompts = GivenPrompts(self.state.given, sizes)

    @property
    def has_kernels(self) -> bool:
        """Whether programs are kernels, not their meaning alone."""
        return self.emit.arch is not None

    @property
    def all_programs(self) -> tuple[Program, ...]:
        """Every program: passes over prompts, the ends of prompts, steps."""
        return (*self.chunks.values(), self.finish, *self.programs.values())

    @property
    def n_under_way(self) -> int:
        """Results of admissions and steps that have not been collected."""
        return len(self._results)

    def prepare(self) -> None:
        """Capture every program now, so that no step has to."""
        for program in self.all_programs:
            self._enqueue_of(program)

    def replay_by(self, replayer: Replayer) -> None:
        """Run programs by `replayer` from now on; what was captured before is dropped."""
        self.replayer = replayer
        self._whole.clear()
        self._staged.clear()

    def change_programs(self, change: Callable[[Program], Program]) -> None:
        """Run `change(program)` in place of every program from now on, for one that is to differ on purpose."""
        self.chunks = {shape: change(program) for shape, program in self.chunks.items()}
        self.finish = change(self.finish)
        self.programs = {batch: change(program) for batch, program in self.programs.items()}
        self._asked.clear()
        self._change = change
        self.replay_by(self.replayer)

    def begin(self, slot: int, request: SlotRequest) -> Reading:
        """Make an empty slot ready for a prompt, which `read_on` then reads; the slot takes part in no step meanwhile.

        One that is given up needs no word: the slot's next takes its place.
        """
        blocks = self.tables.own_blocks(slot) if request.blocks is None else request.blocks
        self.tables.assign(slot, blocks, request.n_cached // self.sizes.block)
        set_draws(self.state.draws, slot, request.sampling, request.first)
        return Reading(slot, request, request.n_cached)

    def read_on(self, readings: Sequence[Reading], trace: Trace) -> int:
        """One pass over prompts, first come first served as far as its spans go; where prompts end in it, sample their
        first tokens, and their slots take part from the next step on.

        Belongs inside the scope "prefill" of the trace.

        Returns:
            rows of the pass, padding included.
        """
        parts, shape = parts_of_pass(readings, list(self.chunks), self.sizes)
        self._prompts.write(parts, shape)
        self._run(self.chunks[shape], trace)
        for reading, n in parts:
            reading.n_read += n
        ended = [reading.request for reading, _ in parts if reading.is_done]
        if ended:
            draws, logprobs = any(one.sampling is not None for one in ended), any(one.logprobs for one in ended)
            # The end reads buffers that a step would overwrite, so it follows its pass at once.
            self._run(self._finish_of(draws, logprobs), trace)
            self._results.send(len(ended), None, logprobs=logprobs)
        return shape.rows

    def admit(self, slot: int, request: SlotRequest, trace: Trace) -> None:
        """Read a whole prompt into an empty slot and sample its first token; the slot then takes part in steps."""
        reading = self.begin(slot, request)
        with trace.scope("prefill"):
            while not reading.is_done:
                self.read_on([reading], trace)

    def rows_of_step(self, n_running: int) -> int:
        """Rows that the target verifies in a step of `n_running` slots, those of the program's padding included."""
        return self._batch_of(n_running) * self.sizes.nodes

    def ready(self, n_running: int, trace: Trace, *, draws: bool = False, logprobs: bool = False) -> None:
        """Capture what `enqueue` will run, unless it is: a clock around the step is not to see that."""
        program = self._step_of(n_running, draws, logprobs)
        if trace.is_detailed:
            self._staged_of(program)
        else:
            self._enqueue_of(program)

    def write_drafts(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Drafts of the next step by slot, of every slot that runs; for a runner without a draft model."""
        self._given.write(drafts, self._batch_of(len(drafts)))

    def enqueue(self, n_running: int, step: int, trace: Trace, *, draws: bool = False, logprobs: bool = False) -> None:
        """Advance every running slot by a step, of which there are at most `n_running`; `draws`: some draw tokens,
        `logprobs`: some ask for those."""
        self._run(self._step_of(n_running, draws, logprobs), trace)
        self._results.send(self._batch_of(n_running), step, logprobs=logprobs)

    def collect(self, *, everything: bool) -> list[Outcome]:
        """Outcomes in the order of the work. Without `everything`, only those that need no waiting for the newest."""
        outcomes = []
        while len(self._results) > (0 if everything else self.n_behind):
            outcomes.append(self._outcome(*self._results.receive()))
        return outcomes

    def release(self, slot: int) -> None:
        """Stop a slot that does not stop by itself; what is enqueued after this may fill it again."""
        self.state.state[RUNNING, slot : slot + 1].zero_()

    def abandon(self) -> None:
        """Empty every slot and forget what is under way, be it of a step that broke off half-way."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        self._results.forget()
        self.state.state[RUNNING].zero_()
        self.state.turn.zero_()  # where the host's count begins again; half a step may have moved it

    def _batch_of(self, n_running: int) -> int:
        return next(n for n in self.programs if n >= n_running)

    def _finish_of(self, draws: bool, logprobs: bool) -> Program:
        """`finish`; one for a request that asks for more than a greedy token is made when the first such comes."""
        if not (draws or logprobs):
            return self.finish
        models = (self.emit, self.target, self.draft, self.state)
        return self._made((None, draws, logprobs), lambda kept: finish_program(*models, draws=draws, logprobs=kept))

    def _step_of(self, n_running: int, draws: bool, logprobs: bool) -> Program:
        """The step; one whose requests ask for more than greedy tokens is made when the first such comes."""
        batch = self._batch_of(n_running)
        if not (draws or logprobs):
            return self.programs[batch]
        models = (self.emit, self.target, self.draft, self.state, batch)
        return self._made((batch, draws, logprobs), lambda kept: step_program(*models, draws=draws, logprobs=kept))

    def _made(self, key: tuple[int | None, bool, bool], make: Callable[[KeptLogprobs | None], Program]) -> Program:
        if key not in self._asked:
            if key[2] and self._logprobs is None:
                columns, device = self.state.head.logits.shape[1], self.target.device
                self._logprobs = new_kept_logprobs(self.n_slots, self.sizes.path_len, columns, device)
            program = make(self._logprobs if key[2] else None)
            self._asked[key] = program if self._change is None else self._change(program)
        return self._asked[key]

    def _run(self, program: Program, trace: Trace) -> None:
        if trace.is_detailed:
            self._staged_of(program)(trace)
        else:
            self._enqueue_of(program)()

    def _staged_of(self, program: Program) -> Staged:
        if id(program) not in self._staged:
            self._staged[id(program)] = self.replayer.staged(program)
        return self._staged[id(program)]

    def _enqueue_of(self, program: Program) -> Enqueue:
        if id(program) not in self._whole:
            self._whole[id(program)] = self.replayer.whole(program)
        return self._whole[id(program)]

    def _outcome(self, sent: Sent, block: list[list[int]]) -> Outcome:
        ranks = None
        if self.state.ranks is not None and sent.step is not None:
            ranks = self.state.ranks[sent.turn].tolist()
        rows = [
            self._row(numbers, None if ranks is None else tuple(ranks[b]))
            for b, numbers in enumerate(block) if numbers[0] >= 0
        ]  # fmt: skip
        if sent.logprobs and self._logprobs is not None:
            live = [b for b, numbers in enumerate(block) if numbers[0] >= 0]
            tokens = {b: row.tokens for b, row in zip(live, rows, strict=True)}
            found = self._logprobs.of(sent.turn, [tokens.get(b, []) for b in range(len(block))])
            rows = [replace(row, logprobs=found[b]) for b, row in zip(live, rows, strict=True)]
        return Outcome(sent.step, rows)

    def _row(self, numbers: list[int], kept: tuple[int, ...] | None) -> RowOutcome:
        (slot, n_accepted, n_committed, finish, fault, request_id), tokens = numbers[:N_RESULT], numbers[N_RESULT:]
        drafts, has_ended = tokens[self.sizes.path_len :], finish != GOES_ON
        is_broken = finish == NO_CHOICE_LEFT
        # Where the target chose nothing there is no bonus; else the host cuts: it knows stops that the device does not.
        n_made = n_committed if is_broken or fault & NOT_FINITE else n_accepted + 1
        ranks, parents = (None, kept) if self.sizes.grown else (kept, None)
        return RowOutcome(
            request_id, slot, tokens[:n_made], drafts, n_accepted, has_ended, is_broken, fault, ranks, parents
        )
