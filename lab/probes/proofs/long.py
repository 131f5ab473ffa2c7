"""Far into a context: thousands of tokens after a long prompt, right to the last, in memory that does not grow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from eagle3core.config import GenerationConfig
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.identity import compare_tokens
from lab.probes.proofs.subject import Setting, Subject

PART = "long"


@dataclass(frozen=True)
class LongPlan:
    """What is run: depths, prompt tokens, generated tokens."""

    ks: tuple[int, ...] = (2, 3, 4, 5)
    context: int = 65536
    n_tokens: int = 2000

    def settings(self) -> list[Setting]:
        """Every engine that is made."""
        return [Setting(k, 1, self.context + self.n_tokens + 8) for k in self.ks]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the device: in tensors, in the allocator's pools, and in use by anybody; allocations so far."""

    allocated: int
    reserved: int
    used: int
    n_allocations: int


class LongRuns:
    """Checks of one planted pair: one a depth."""

    def __init__(self, subject: Subject, prompt: Sequence[int], plan: LongPlan) -> None:
        self.subject, self.prompt, self.plan = subject, list(prompt), plan

    def checks(self) -> list[Check]:
        """One a depth."""
        shared = {"pair": self.subject.name, "context": len(self.prompt), "n_tokens": self.plan.n_tokens}
        return [
            Check(PART, f"{self.subject.name} spec-{s.k}", {**shared, "spec_k": s.k}, partial(self._judge, s))
            for s in self.plan.settings()
        ]

    def _judge(self, setting: Setting) -> Verdict:
        engine, tokens = self.subject.engine(setting), self.subject.tokens
        assert tokens is not None, "the pair is planted"
        engine.generate([self.prompt[:8]], GenerationConfig(8, ignore_eos=True))  # whatever is made on first use
        before, start = memory_use(self.subject.on_gpu), time.perf_counter()
        [response] = engine.generate([self.prompt], GenerationConfig(self.plan.n_tokens, ignore_eos=True))
        took, after = time.perf_counter() - start, memory_use(self.subject.on_gpu)
        right = compare_tokens([list(response.token_ids)], [tokens.follow(self.prompt[-1], self.plan.n_tokens)])
        return judge_long(right, before, after, took)


def judge_long(right: Verdict, before: MemoryUse, after: MemoryUse, took_s: float) -> Verdict:
    """Whether the tokens were right and memory did not grow."""
    growth = {
        f"{name}_growth_bytes": getattr(after, name) - getattr(before, name) for name in ("allocated", "reserved")
    }
    growth["allocations"] = after.n_allocations - before.n_allocations
    values = {**right.values, **growth, "used_growth_bytes": after.used - before.used, "decode_s": took_s}
    grown = [f"{name} {value}" for name, value in growth.items() if value > 0]
    detail = f"{right.detail}; {'memory grew: ' + ', '.join(grown) if grown else 'memory flat'}; {took_s:.1f} s"
    return Verdict(right.held and not grown if right.held is not None else None, detail, values)


def memory_use(on_gpu: bool) -> MemoryUse:
    """The current device's; zeros on a CPU, whose tensors nobody counts."""
    if not on_gpu:
        return MemoryUse(0, 0, 0, 0)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    n_allocations = int(torch.cuda.memory_stats()["allocation.all.allocated"])
    return MemoryUse(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free, n_allocations)
