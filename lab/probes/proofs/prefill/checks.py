"""The time to the first token of short, long and many prompts, and the bits that passes of all sizes leave behind.

Times are the host's, from the arrival of prompts at an idle engine to the last one's first token, and beside them the
device's own over the passes. Source: docs/requirements.md R-89; the bounds on an H200 are the project's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from eagle3core.request import RequestHandle
from eagle3core.step import DeviceRunner, SlotRequest
from eagle3core.trace import Trace
from lab.probes.bench.clocks import SpanClock
from lab.probes.bench.run import read_ceiling
from lab.probes.ceilings import gpu_name, known_tflop_per_s
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.identity import compare_tokens
from lab.probes.proofs.prefill.bound import reading_bound
from lab.probes.proofs.prefill.judging import ReadingTimes, judge_bits, judge_load, judge_rate
from lab.probes.proofs.prefill.peer import TorchPrefill, product_tflop_per_s
from lab.probes.proofs.subject import Setting, Subject, WatchedEngine
from lab.probes.proofs.timed import TimedReplayer
from lab.probes.proofs.waiting import HEADROOM, first_tokens

PART = "prefill"


@dataclass(frozen=True)
class Load:
    """Prompts that arrive together at an idle engine.

    Attributes:
        n: of them, each of `tokens`. most_ms: to the last one's first token; None: any.
    """

    n: int
    tokens: int
    most_ms: float | None = None

    @property
    def name(self) -> str:
        """For rows."""
        return f"{self.n} x {self.tokens}"


@dataclass(frozen=True)
class PrefillPlan:
    """What is measured; times are of an H200 and the 8B shape.

    Attributes:
        loads: in order; the last is also to be read at `least_rate` of the token rate of `rated`.
        chunk: rows of the largest pass. k: drafts, whose model reads prompts too. rounds: after an untimed one.
        sizes: largest passes that leave the same bits of prompts of `lengths`, together and each alone.
        product: rows and columns of the matrices that a run's own product ceiling is taken of.
        apart: loads whose passes are run stage by stage once more, to say what takes the time.
    """

    loads: tuple[Load, ...] = (
        Load(1, 20, 7.0), Load(1, 64, 7.0), Load(1, 512, 15.0), Load(1, 4096), Load(1, 32768, 1500.0),
        Load(4, 16384, 2500.0), Load(64, 100),
    )  # fmt: skip
    rated: Load = Load(1, 4096)
    least_rate: float = 0.40
    chunk: int = 1536  # eight blocks of 192 rows, the height at which products of long prompts are fastest
    k: int = 3
    rounds: int = 3
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024, 1536, 2048)
    lengths: tuple[int, ...] = (100, 700, 64, 1300)  # together more rows than the largest pass
    product: int = 8192
    apart: tuple[Load, ...] = (Load(1, 512, 15.0), Load(1, 32768, 1500.0))

    def setting(self, load: Load) -> Setting:
        """The engine of a load."""
        return Setting(self.k, load.n, load.tokens + HEADROOM, chunk=self.chunk)

    def company(self, chunk: int) -> Setting:
        """An engine whose bits are looked at, with passes up to `chunk`."""
        return Setting(self.k, len(self.lengths), max(self.lengths) + HEADROOM, chunk=chunk)

    def settings(self) -> list[Setting]:
        """Every engine that is made."""
        return [*(self.setting(load) for load in self.loads), *(self.company(chunk) for chunk in self.sizes)]


class Prefill:
    """Checks of one planted pair.

    Args:
        prompts: `prompts(n, length)`.
    """

    def __init__(self, subject: Subject, prompts: Callable[[int, int], list[list[int]]], plan: PrefillPlan) -> None:
        self.subject, self.prompts, self.plan = subject, prompts, plan
        self.times = cache(self._times)

    def checks(self) -> list[Check]:
        """A check a load, the rate of many short prompts, and the bits."""
        plan, name = self.plan, self.subject.name
        shared = {"pair": name, "spec_k": plan.k, "chunk": plan.chunk}
        found = [
            Check(PART, f"{name} {load.name}", {**shared, "n": load.n, "tokens": load.tokens},
                  partial(self._judge_load, load))
            for load in plan.loads
        ]  # fmt: skip
        many = plan.loads[-1]
        rate = {**shared, "n": many.n, "tokens": many.tokens, "rated": plan.rated.name}
        sizes = {**shared, "sizes": list(plan.sizes), "lengths": list(plan.lengths)}
        found.append(Check(PART, f"{name} rate of {many.name}", rate, self._judge_rate))
        return [*found, Check(PART, f"{name} bits of every size", sizes, self._judge_bits)]

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """10^12 operations, and 10^9 bytes, a second of this machine: what is known of its kind, or of this run."""
        device = self.subject.target.device
        tflop = known_tflop_per_s(gpu_name(device))
        tflop = tflop or product_tflop_per_s(device, self.subject.target.dtype, self.plan.product)
        return tflop, read_ceiling(device)

    def _times(self, load: Load) -> ReadingTimes:
        subject, prompts = self.subject, self.prompts(load.n, load.tokens)
        engine = subject.engine(self.plan.setting(load), through=lambda own: TimedReplayer(own, subject.on_gpu))
        timed, runner = engine.runner.replayer, engine.runner
        assert isinstance(timed, TimedReplayer)
        handles: list[RequestHandle] = []
        first_tokens(engine, prompts, handles)  # whatever is made on first use
        reading = {id(program) for program in runner.reading}
        first_ms, device_ms = [], []
        for _ in range(self.plan.rounds):
            timed.times.clear()
            n_before = engine.book.n_passes
            first_ms.append(1e3 * max(first_tokens(engine, prompts, handles)))
            if subject.on_gpu:
                torch.cuda.synchronize(subject.target.device)
            device_ms.append(sum(one.took_us() for one in timed.times if id(one.program) in reading) / 1e3)
        n_passes = engine.book.n_passes - n_before
        stage_ms = self._stage_ms(engine, prompts, handles) if load in self.plan.apart else {}
        bound = reading_bound(subject.target.geometry, load.n, load.tokens, subject.target.dtype.itemsize)
        del engine, runner, timed  # a peer of 32K tokens needs the room
        peer_ms, reason = self._peer_ms(load)
        return ReadingTimes(
            tuple(first_ms), tuple(device_ms), n_passes, load.n * load.tokens, bound.ms(*self._rates), bound.flops,
            peer_ms, reason, self._right(prompts, handles), stage_ms,
        )  # fmt: skip

    def _stage_ms(
        self, engine: WatchedEngine, prompts: Sequence[Sequence[int]], handles: list[RequestHandle]
    ) -> dict[str, float]:
        for _ in range(2):  # the first makes what the second is to find there
            engine.trace = clock = SpanClock(self.subject.target.device, scope="prefill")
            first_tokens(engine, prompts, handles)
        engine.trace = Trace()
        return {name: us / 1e3 for name, us in clock.bars_us.items()}

    def _peer_ms(self, load: Load) -> tuple[float | None, str]:
        target = self.subject.target
        if self.subject.on_gpu:
            torch.cuda.empty_cache()
        try:
            return TorchPrefill(target.geometry, target.dtype, target.device).ms(load.n, load.tokens), ""
        except torch.OutOfMemoryError as error:
            return None, str(error).splitlines()[0]

    def _right(self, prompts: Sequence[Sequence[int]], handles: Sequence[RequestHandle]) -> Verdict:
        tokens = self.subject.tokens
        assert tokens is not None, "the pair is planted"
        got = [list(handle.token_ids) for handle in handles]
        asked = [prompts[i % len(prompts)] for i in range(len(got))]
        wanted = [tokens.follow(prompt[-1], len(one)) for prompt, one in zip(asked, got, strict=True)]
        return compare_tokens(got, wanted)

    def _judge_load(self, load: Load) -> Verdict:
        return judge_load(self.times(load), load.most_ms)

    def _judge_rate(self) -> Verdict:
        return judge_rate(self.times(self.plan.loads[-1]), self.times(self.plan.rated), self.plan.least_rate)

    def _judge_bits(self) -> Verdict:
        plan = self.plan
        prompts = {slot: self.prompts(1, n)[0] for slot, n in enumerate(plan.lengths)}
        expected: dict[int, list[Tensor]] = {}
        differing: dict[str, int] = {}
        for chunk in plan.sizes:
            runner = self.subject.runner(plan.company(chunk))
            for slots in (*((slot,) for slot in prompts), tuple(prompts)):
                left = left_behind(runner, {slot: prompts[slot] for slot in slots})
                for slot, tensors in left.items():
                    wanted = expected.setdefault(slot, tensors)
                    n = sum(int((a != b).sum()) for a, b in zip(tensors, wanted, strict=True))
                    if n:
                        differing[f"{plan.lengths[slot]} tokens, {len(slots)} prompts, passes of {chunk}"] = n
        return judge_bits(differing, sum(t.numel() for tensors in expected.values() for t in tensors), len(plan.sizes))


def left_behind(runner: DeviceRunner, prompts: dict[int, list[int]]) -> dict[int, list[Tensor]]:
    """int16 bits of the cached keys and values of prompts read together, by slot, all layers."""
    readings = [runner.begin(slot, SlotRequest(slot, prompt, 4, ())) for slot, prompt in prompts.items()]
    while left := [reading for reading in readings if not reading.is_done]:
        runner.read_on(left, Trace())
        runner.collect(everything=True)
    found: dict[int, list[Tensor]] = {}
    for slot, prompt in prompts.items():
        blocks = list(runner.tables.own_blocks(slot))[: -(-len(prompt) // runner.sizes.block)]
        at = torch.tensor(blocks, device=runner.target.device)
        found[slot] = []
        for pages in runner.state.pages:  # `[..., blocks, heads, block, D]`, the draft's without layers
            held = pages.index_select(pages.dim() - 4, at).transpose(-3, -2).flatten(-4, -3)
            rows = held.narrow(-3, 0, len(prompt) - 1)  # of its last token a draft has read nothing yet
            found[slot].append(rows.contiguous().view(torch.int16))
    runner.abandon()
    return found
