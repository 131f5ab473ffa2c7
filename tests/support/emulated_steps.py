"""A first step's drafts by the kernels themselves, lane by lane, beside what their launches mean."""

from __future__ import annotations

from typing import Any

import torch
from device_engines import device_runner
from tiny_engines import Pair, random_prompts
from torch import Tensor

from eagle3core.step.admission import SlotRequest
from eagle3core.step.replay import EagerReplayer, Replayer, emulate
from eagle3core.step.tree import GrownTree
from eagle3core.trace import Trace

LANES, MEANING = EagerReplayer(emulate), EagerReplayer()


def first_step(pair: Pair, replayer: Replayer, tree: GrownTree | None, **how: Any) -> dict[str, Tensor]:
    """What the first step leaves of its drafts; the prompt is read by meaning, which is quicker."""
    k = None if tree else 2
    runner = device_runner(pair, k, MEANING, n_slots=1, chunk=8, tree=tree, **how)
    runner.admit(0, SlotRequest(0, random_prompts([6], n_vocab=64, seed=2)[0], 9, ()), Trace())
    runner.collect(everything=True)
    runner.replay_by(replayer)
    runner.enqueue(1, 0, Trace())
    runner.collect(everything=True)
    own, made = runner.state.draft, runner.state.tree
    assert own is not None
    drafts = runner.state.step.drafted if made is None else made.selection.tokens
    states = {"feedback": own.feedback, "next": own.next_feedback, "out": own.out}
    return {"drafts": drafts.clone(), **{name: tensor.clone() for name, tensor in states.items()}}


def check_first_step(pair: Pair, tree: GrownTree | None, **how: Any) -> None:
    """That kernels leave the drafts of their meaning, and its states but for their order of summing; `how`: of
    `device_runner`."""
    lanes, meaning = (first_step(pair, replayer, tree, **how) for replayer in (LANES, MEANING))
    assert torch.equal(lanes["drafts"], meaning["drafts"])
    for name in ("feedback", "next", "out"):
        error = (lanes[name].float() - meaning[name].float()).abs().max()
        assert error <= 2**-6 * meaning[name].float().abs().max(), name  # sums in another order, rounded to bf16
    assert meaning["feedback"].abs().max() > 0
