"""What runs under a sanitizer: a few requests of the shipped pair through the whole engine, with its tokens checked.

`python3 -m lab.probes.proofs.watched_run --result FILE` needs a GPU; `--plant` only puts a request into a slot
that does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from eagle3core.config import GenerationConfig
from eagle3core.kernels import launch
from eagle3core.step import EagerReplayer, calls_of, launches_of
from lab.options.kernels import WatchedRunOptions
from lab.options.reader import run_program
from lab.pairs import shipped_pair
from lab.pairs.prompts import prompts_for
from lab.probes.proofs.subject import Setting, Subject, WatchedEngine, open_subject


@dataclass(frozen=True)
class WatchedPlan:
    """What is run: drafts a step, slots, prompts and their tokens, generated tokens.

    More prompts than slots, so that slots empty and fill.
    """

    k: int = 3
    slots: int = 2
    n_prompts: int = 3
    prompt_tokens: int = 40
    n_tokens: int = 12

    def settings(self) -> list[Setting]:
        """Every engine that is made: plain, then with drafts."""
        session = self.prompt_tokens + self.n_tokens + 2 * (self.k + 1)
        return [Setting(k, self.slots, session) for k in (0, self.k)]


@dataclass
class Watched:
    """A run: engines made, kernels launched in their steps, and what was wrong, in words."""

    cases: int = 0
    launches: int = 0
    faults: list[str] = field(default_factory=list)


def watched(subject: Subject, prompts: Sequence[list[int]], plan: WatchedPlan) -> Watched:
    """Tokens of every setting, which must be the plain engine's."""
    found, plain = Watched(), None
    for setting in plan.settings():
        engine = subject.engine(setting)
        responses = engine.generate(prompts, GenerationConfig(plan.n_tokens, ignore_eos=True))
        tokens = [list(response.token_ids) for response in responses]
        plain = plain or tokens
        if tokens != plain:
            found.faults.append(f"spec-{setting.k} gives {tokens}, plain decoding {plain}")
        found.cases += 1
        found.launches += _kernels(engine, plan)
    return found


def stray(subject: Subject, plan: WatchedPlan) -> Watched:
    """The last kernel of a prefill, with a slot one past the last, so that it writes outside the state's tensors.

    That kernel alone: after one that the tool stopped, those of a graph that wait for it never end.
    """
    runner = subject.runner(plan.settings()[0])
    runner.state.given[0] = plan.slots  # the slot of the first request that ends
    admission = calls_of(runner.finish)[-1:]
    if isinstance(subject.replayer, EagerReplayer):
        subject.replayer.execute(admission)
    else:
        launch.execute(admission[0].launches)
        torch.cuda.synchronize()
    return Watched(cases=1, launches=len(admission[0].launches))


def _kernels(engine: WatchedEngine, plan: WatchedPlan) -> int:
    """Kernels of the prefills, and of one step: a lower bound of what the tool saw."""
    runner = engine.runner
    step, finish = runner.programs[plan.slots], runner.finish
    prefill = min(len(launches_of(chunk)) for chunk in runner.chunks.values()) + len(launches_of(finish))
    n_passes = -(-plan.n_prompts // runner.sizes.n_ends)  # the fewest, with as many prompts in each as can end in it
    return len(launches_of(step)) + n_passes * prefill


def main(options: WatchedRunOptions) -> int:
    """Run, and write what was found to --result; 0 whatever it is, since the tool's verdict is wanted."""
    plan = WatchedPlan()
    prompts, _ = prompts_for(shipped_pair().target, limit=plan.n_prompts, max_tokens=plan.prompt_tokens)
    with torch.no_grad():
        subject, ids = open_subject("shipped"), [list(p.ids) for p in prompts]
        found = stray(subject, plan) if options.plant else watched(subject, ids, plan)
    options.result.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_program(WatchedRunOptions, main)
