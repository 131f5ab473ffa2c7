"""What runs under a sanitizer: a few requests of the shipped pair through the whole engine, with its tokens checked.

`python3 -m lab.proofs.watched_run --result FILE` needs a GPU; `--plant` only reads a prompt into a slot
whose cache lies outside the pool.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from eagle3core.config import GenerationConfig
from eagle3core.decode.program import launches_of
from eagle3core.decode.replay import EagerReplayer
from eagle3core.decode.runner import SlotRequest
from eagle3core.kernels import launch
from eagle3core.kernels.card import Launch
from eagle3core.trace import Trace
from lab.pairs import shipped_pair
from lab.prompts import prompts_for
from lab.proofs.subject import Setting, Subject, WatchedEngine, open_subject

FAR_BLOCK = 1 << 20  # of a table entry: gigabytes past the end of the pool


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


def stray(subject: Subject, prompt: list[int], plan: WatchedPlan) -> Watched:
    """Read a prompt into a slot whose blocks lie outside the pool, kernel by kernel.

    Neither a whole request nor a graph: where the tool stops a kernel, those that wait for it never end.
    """
    ran = 0

    def one_by_one(launches: Sequence[Launch]) -> None:
        nonlocal ran
        for item in launches:
            execute([replace(item, overlap=False)])
            ran += 1

    plain = subject.replayer
    execute = plain.execute if isinstance(plain, EagerReplayer) else _alone
    runner = subject.runner(plan.settings()[0], lambda _: EagerReplayer(one_by_one))
    runner.state.tables[0].fill_(FAR_BLOCK)
    runner.admit(0, SlotRequest(prompt, plan.n_tokens, ()), Trace())
    return Watched(cases=1, launches=ran)


def _alone(launches: Sequence[Launch]) -> None:
    launch.execute(launches)
    torch.cuda.synchronize()


def _kernels(engine: WatchedEngine, plan: WatchedPlan) -> int:
    """Kernels of the prefills, and of one step: a lower bound of what the tool saw."""
    runner = engine.device_runner
    step, prefill = runner.programs[plan.slots], [*launches_of(runner.chunk), *launches_of(runner.finish)]
    return len(launches_of(step)) + plan.n_prompts * len(prefill)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write what was found to --result; 0 whatever it is, since the tool's verdict is wanted."""
    parser = argparse.ArgumentParser(prog="lab.proofs.watched_run", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--result", type=Path, required=True, help="JSON file for the counts and faults")
    parser.add_argument("--plant", action="store_true", help="only read a prompt, into a slot outside the pool")
    given = parser.parse_args(arguments)
    plan = WatchedPlan()
    prompts, _ = prompts_for(shipped_pair().target, limit=plan.n_prompts, max_tokens=plan.prompt_tokens)
    with torch.no_grad():
        subject, ids = open_subject("shipped"), [list(p.ids) for p in prompts]
        found = stray(subject, ids[0], plan) if given.plant else watched(subject, ids, plan)
    given.result.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
