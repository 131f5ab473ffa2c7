"""What a tree costs: the target's pass over its nodes beside a plain step, and the bookkeeping of a whole step.

A pass over a few rows reads the same bytes as plain decoding, so what it costs beyond a plain step is what the kernels
lose by more rows. Stages are taken apart with a profiler (`lab.probes.proofs.steps`), both in one run.
Source: docs/requirements.md R-53; SpecInfer, arXiv 2305.09781, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.identity import compare_tokens
from lab.probes.proofs.steps import BETWEEN_STEPS, StepProfile, profile_steps, tokens_for
from lab.probes.proofs.subject import Setting, Subject, tree_setting

PART = "trees"
BOOKKEEPING = ("tree", "accept", "commit", "rewind")
MOST_BOOKKEEPING_US = 60.0
DEEPEST = 8  # levels that a session has room for


@dataclass(frozen=True)
class TreeCostPlan:
    """What is measured at one sequence.

    Attributes:
        bounds: most of a plain step that the target's pass over a tree may take, by the tree's shape.
        contexts: tokens of the prompt. n_steps: profiled.
    """

    bounds: Mapping[str, float]
    contexts: tuple[int, ...] = (512, 32768)
    n_steps: int = 20

    def session(self, context: int) -> int:
        """Tokens of a session."""
        return context + tokens_for(self.n_steps, DEEPEST) + 8

    def settings(self) -> list[Setting]:
        """Every engine that is made."""
        return [
            setting
            for context in self.contexts
            for setting in (self.plain(context), *(self.tree(name, context) for name in self.bounds))
        ]

    def plain(self, context: int) -> Setting:
        """Plain decoding after `context` tokens."""
        return Setting(0, 1, self.session(context))

    def tree(self, name: str, context: int) -> Setting:
        """A tree after `context` tokens."""
        return tree_setting(name, 1, self.session(context))


H200_TREES = TreeCostPlan(
    {
        "dynamic-8/3/4": 1.06, "dynamic-16/4/4": 1.13, "dynamic-32/5/6": 1.35, "dynamic-64/6/8": 1.50,
        "dynamic-60/7/10": 1.50,
    }
)  # fmt: skip


class TreeCosts:
    """Checks of one planted pair: one a tree and context.

    Args:
        prompts: of `n` tokens.
    """

    def __init__(self, subject: Subject, prompts: Callable[[int], list[int]], plan: TreeCostPlan) -> None:
        self.subject, self.plan = subject, plan
        self._prompt = cache(prompts)
        self._plain = cache(lambda context: self._profile(plan.plain(context), context)[0])

    def checks(self) -> list[Check]:
        """The tokens and the cost of every tree."""
        shared = {"pair": self.subject.name, "slots": 1}
        return [
            Check(PART, f"{self.subject.name} {name} at {context}", {**shared, "context": context, "tree": name},
                  partial(self._judge, name, context))
            for context in self.plan.contexts
            for name in self.plan.bounds
        ]  # fmt: skip

    def _judge(self, name: str, context: int) -> Verdict:
        plain = self._plain(context)
        profile, right = self._profile(self.plan.tree(name, context), context)
        return judge_cost(right, profile, plain, self.plan.bounds[name])

    def _profile(self, setting: Setting, context: int) -> tuple[StepProfile, Verdict]:
        """Steps taken apart, and whether the tokens are the planted ones."""
        tokens, prompt = self.subject.tokens, self._prompt(context)
        assert tokens is not None, "the pair is planted"
        profile = profile_steps(self.subject.engine(setting), [prompt], self.plan.n_steps)
        got = list(profile.responses[0].token_ids)
        return profile, compare_tokens([got], [tokens.follow(prompt[-1], len(got))])


def judge_cost(right: Verdict, profile: StepProfile, plain: StepProfile, bound: float) -> Verdict:
    """Whether the tokens are right, and both the target's pass and the bookkeeping cost at most what they may."""
    plain_us, step_us = median(plain.step_us), median(profile.step_us)
    parts = {stage.stage: median(stage.own_us) for stage in profile.stages}
    target_us = sum(us for name, us in parts.items() if name.startswith("target."))
    books_us = sum(parts.get(name, 0.0) for name in BOOKKEEPING)
    over, steps = target_us / plain_us, [s for r in profile.responses for s in r.req_metrics.steps]
    length = sum(step.n_accepted + 1 for step in steps) / len(steps)
    values = {
        **right.values,
        **{f"stage_us.{name}": us for name, us in parts.items() if name != BETWEEN_STEPS},
        **{f"kernel_us.{one.stage}": median(one.own_us) for one in profile.kernels if one.stage.startswith("target.")},
        "step_us": step_us,
        "plain_step_us": plain_us,
        "target_us": target_us,
        "target_over_plain": over,
        "most_target_over_plain": bound,
        "bookkeeping_us": books_us,
        "most_bookkeeping_us": MOST_BOOKKEEPING_US,
        "mean_acceptance_length": length,
        "speedup": length * plain_us / step_us,
    }
    detail = (
        f"{right.detail}; target {over:.3f} of a plain step (at most {bound}); bookkeeping {books_us:.0f} us (at most "
        f"{MOST_BOOKKEEPING_US:.0f}); step {step_us:.0f} us for {length:.2f} tokens, plain {plain_us:.0f} us"
    )
    held = None if right.held is None else right.held and over <= bound and books_us <= MOST_BOOKKEEPING_US
    return Verdict(held, detail, values)
