"""An engine's runner driven by hand, step by step, and what its state must hold after each one."""

from __future__ import annotations

import torch

from eagle3core import Engine
from eagle3core.kernels.slots.slot_state import DRAFT_LENGTH, LENGTH, N_PENDING, ROOT
from eagle3core.step.admission import SlotRequest
from eagle3core.step.outcome import RowOutcome
from eagle3core.step.run import DeviceRunner
from eagle3core.trace import RecordingTrace, Trace

QUIET = Trace()
ENOUGH = 999  # tokens, more than a session holds


def admit(runner: DeviceRunner, slot: int, prompt: list[int], trace: Trace = QUIET) -> int:
    """Read a prompt into a slot; its first token."""
    runner.admit(slot, SlotRequest(slot, prompt, ENOUGH, ()), trace)
    [outcome] = runner.collect(everything=True)
    return outcome.rows[0].tokens[0]


def start(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Prefill one slot a prompt; the sequences so far, first sampled token included."""
    return [[*prompt, admit(engine.runner, slot, prompt)] for slot, prompt in enumerate(prompts)]


def advance(engine: Engine, sequences: list[list[int]]) -> list[RowOutcome]:
    """One step of every slot; appends what each committed."""
    engine.runner.enqueue(len(sequences), 0, QUIET)
    [outcome] = engine.runner.collect(everything=True)
    for row in outcome.rows:
        sequences[row.slot] += row.tokens
    return outcome.rows


def cached(runner: DeviceRunner, pages: torch.Tensor, slot: int, n_tokens: int) -> torch.Tensor:
    """Rows `[layers, n_tokens, K, D]` of a slot in `pages: [layers, n_blocks, K, block, D]`."""
    token, block = torch.arange(n_tokens), pages.shape[3]
    return pages[:, runner.state.tables[slot].long()[token // block], :, token % block]


def assert_state_is_true(engine: Engine, fresh: Engine, sequences: list[list[int]]) -> None:
    """Every slot's caches and pending taps are those of a fresh prefill of its sequence."""
    runner, state = engine.runner, engine.runner.state
    assert state.draft is not None
    for slot, sequence in enumerate(sequences):
        n_cached, n_read, n_pending, root = (
            int(state.state[field, slot]) for field in (LENGTH, DRAFT_LENGTH, N_PENDING, ROOT)
        )
        assert (n_cached, root) == (len(sequence) - 1, sequence[-1])
        assert n_read + n_pending == n_cached
        trace = RecordingTrace()
        admit(fresh.runner, 0, sequence[:-1], trace)
        theirs = fresh.runner.state
        assert theirs.draft is not None
        for ours, expected in ((state.k, theirs.k), (state.v, theirs.v)):
            close(cached(runner, ours, slot, n_cached), cached(fresh.runner, expected, 0, n_cached))
        for ours, expected in ((state.draft.k, theirs.draft.k), (state.draft.v, theirs.draft.v)):
            close(cached(runner, ours[None], slot, n_read), cached(fresh.runner, expected[None], 0, n_read))
        rows = state.pending_rows[slot, :n_pending].long()
        streams = [
            f"prefill/target.{layer - 1}.mlp" if layer else "prefill/target.embed" for layer in engine.target.taps
        ]
        for captured, stream in zip(state.captured, streams, strict=True):
            close(captured[rows], trace.tensors[stream][n_read:])
        assert state.pending_tokens[slot, :n_pending].tolist() == sequence[n_read + 1 :]
        fresh.runner.release(0)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of fp64 sums of another order."""
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)
