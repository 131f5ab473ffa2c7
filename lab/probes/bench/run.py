"""One call of the bench: every point, every depth and every peer, in the same rounds, into rows.

A point that does not fit in memory gives missing rows with the plan; a peer that cannot run makes the rows beside it
incomplete, with its reason. Tokens are checked: a mode that does not decode the baseline's tokens says so in its row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eagle3core.config import GenerationConfig
from eagle3core.errors import Eagle3Error
from eagle3core.geometry import DraftGeometry, TargetGeometry
from lab.errors import ExperimentError, LabError
from lab.pairs.planted import find_geometry
from lab.probes.bench import memory
from lab.probes.bench.invariants import invariants_block
from lab.probes.bench.peers import Peer, PeerRound
from lab.probes.bench.peers.compiled_torch import CompiledTorch
from lab.probes.bench.peers.plain_torch import PlainTorch
from lab.probes.bench.record import Rows, memory_block, system_block
from lab.probes.bench.results import Key, PeerResult, PointResult, line_of
from lab.probes.bench.rounds import Sustained, Work, interleave, tokens_to_sustain
from lab.probes.bench.scenario import CACHE_SHARE, Point, Scenario
from lab.probes.bench.source import HEADROOM, PairSource, open_pair
from lab.probes.ceilings import ceiling_words, gpu_name, known_gb_per_s, memory_ceilings
from lab.probes.kernels.reading.ceiling import clock_values, run_ceiling
from lab.rows.environment import collect
from lab.rows.store import Row

Tell = Callable[[str], None]
Keep = Callable[[Sequence[Row]], None]
PEER_STEPS = 64  # of a round, at most
SPAN_TOKENS = 128  # of the pass that takes steps apart, at most: it waits for the device many times a step


class Contender:
    """A peer on its way: built, run once a round, and given up with a reason when it fails."""

    def __init__(self, build: Callable[[], Peer]) -> None:
        self.reason: str | None = None
        self.peer: Peer | None = None
        self.peer = self._guarded(build)

    def once(self) -> PeerRound | None:
        """One round, or None once it has failed."""
        return self._guarded(self.peer.run) if self.peer is not None and self.reason is None else None

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # not our code: whatever stops a peer is the reason why its row is missing
            first = str(error).strip().splitlines()
            self.reason = f"{type(error).__name__}: {first[0] if first else 'no message'}"
            return None


class Bench:
    """A scenario being measured.

    Args:
        scenario: what to measure.
        run: name of the run, in every row.
        tell: gets a line at every milestone.
        rows: takes the rows; None begins a run's.
        keep: gets the rows of each point as soon as it is done, so that what ends the run costs no point before it.
        spans: depths whose steps are taken apart in one more pass, for `stage_ms.*`; None: all.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        run: str = "bench",
        tell: Tell = print,
        rows: Rows | None = None,
        spans: Collection[int] | None = None,
        keep: Keep = lambda rows: None,
    ) -> None:
        self.scenario, self.tell, self.spans, self.keep = scenario, tell, spans, keep
        self.device = torch.device(scenario.device)
        self.rows = rows or Rows(run, collect(), [])

    def run(self) -> Rows:
        """Rows of every point."""
        if self.scenario.pair == "planted":
            geometry = find_geometry(self.scenario.geometry)
            plans = {point: self.plan(geometry.target, geometry.draft, point) for point in self.scenario.points}
            if not any(plan.engine_fits for plan in plans.values()):  # then the weights need not be made
                for point, plan in plans.items():
                    self._all_missing(point, f"does not fit: {plan}")
                self.keep(self.rows.rows)
                return self.rows
        source = open_pair(self.scenario)
        gb_per_s = read_ceiling(self.device)
        self.tell(about(source, self.device, gb_per_s))
        for point in self.scenario.points:
            first = len(self.rows.rows)
            with torch.no_grad():
                self.measure(source, point, gb_per_s)
            self.keep(self.rows.rows[first:])
            free(self.device)
        return self.rows

    def measure(self, source: PairSource, point: Point, gb_per_s: float) -> None:
        """Rows of one point."""
        plan = self.plan(source.target_geometry, source.draft_geometry, point)
        self.tell(f"{point}: {plan}")
        if not plan.engine_fits:
            self._all_missing(point, f"does not fit: {plan}")
            return
        works = self._engines(source, point)
        contenders = self._contenders(source, point, None if plan.peers_fit else f"does not fit: {plan}")
        runs: dict[Key, Callable[[], Any]] = {("engine", k): work.run for k, work in works.items()}
        runs |= {key: contender.once for key, contender in contenders.items()}
        used: list[int] = []
        clocks: dict[str, Any] = {}

        def on_round(number: int) -> None:
            self.tell(f"  round {number + 1} of {self.scenario.rounds}" if number >= 0 else "  warming up")
            used.append(memory.used_bytes(self.device))
            if number <= 0:
                clocks.update(clock_values("clocks_before", self.device))

        scenario = self.scenario
        measured = interleave(runs, rounds=scenario.rounds, warmup=scenario.warmup, on_round=on_round)
        clocks |= clock_values("clocks_after", self.device)
        used.append(memory.used_bytes(self.device))
        peers = {
            key: PeerResult(one.peer, [] if one.reason else measured[key], one.reason)
            for key, one in contenders.items()
        }
        rounds = {k: measured["engine", k] for k in works}
        sustained = {k: self._sustain(source, point, k) for k in works if scenario.sustained}
        ceiling = run_ceiling(self.device)  # last, so that the GPU is as warm as all these steps left it
        self.tell(f"  this run reads {ceiling.gb_per_s:.0f} GB/s ({ceiling.reader})")
        shared = {**system_block(self.rows.environment, self.device), **memory_block(used[1:], self.device), **clocks}
        result = PointResult(scenario, source, point, works, rounds, peers, gb_per_s, ceiling, sustained, self.spans)
        self._write(result, shared)

    def _sustain(self, source: PairSource, point: Point, k: int) -> Sustained:
        """At least `scenario.sustained` steps in one pass, by an engine whose session has room for them."""
        n_tokens = tokens_to_sustain(self.scenario.sustained, k)
        self.tell(f"  {point.name(k)}: {self.scenario.sustained} steps without a rest")
        try:
            work = self._work(source, point, k, n_tokens, rests=False)
            clocks = clock_values("before", self.device)
            window = work.run().full
        except (LabError, Eagle3Error, torch.OutOfMemoryError) as error:
            return Sustained(None, n_tokens, {}, str(error).splitlines()[0])
        clocks |= clock_values("after", self.device)
        return Sustained(window, n_tokens, clocks, "" if window else "no step had every slot in use")

    def _write(self, result: PointResult, shared: Mapping[str, Any]) -> None:
        point = result.point
        for k, work in result.works.items():
            work.generation = replace(work.generation, max_new_tokens=min(self.scenario.tokens, SPAN_TOKENS))
            values = {**result.engine_values(k), **invariants_block(work, k), **shared}
            name = self.scenario.name(point, k)
            self.rows.measured(name, values, self.parameters(point, k, "engine"), self.scenario)
            self.tell("  " + line_of(name, values))
        for (name, k), one in result.peers.items():
            label, parameters = f"{point.name(k)}/{name}", self.parameters(point, k, name)
            if one.reason:
                self.rows.missing(label, one.reason, parameters)
                self.tell(f"  {label}: missing: {one.reason}")
                continue
            values = {**result.peer_values((name, k)), **shared}
            self.rows.measured(label, values, parameters, self.scenario)
            self.tell(f"  {label}: {values['step_ms_median']:.3f} ms a step")

    def _all_missing(self, point: Point, reason: str) -> None:
        for k in self.scenario.ks:
            self.rows.missing(self.scenario.name(point, k), reason, self.parameters(point, k, "engine"))
        for name, k in self._peer_keys():
            self.rows.missing(f"{point.name(k)}/{name}", reason, self.parameters(point, k, name))
        self.tell(f"{point}: missing: {reason}")

    def parameters(self, point: Point, k: int, who: str) -> dict[str, Any]:
        """Where a row stands in the grid."""
        scenario = self.scenario
        # Named only where it is not the usual one, so that rows of old still belong to the same series.
        cache: dict[str, Any] = {} if scenario.cache_share == CACHE_SHARE else {"cache_share": scenario.cache_share}
        rule = scenario.rule(k)
        forced = {} if rule is None else {"acceptance": rule.label}
        stored = {} if k == 0 or scenario.draft_weights == "as_stored" else {"draft_weights": scenario.draft_weights}
        stored |= {} if scenario.target_weights == "as_stored" else {"target_weights": scenario.target_weights}
        repeated = {"repeated_experts": scenario.repeated} if scenario.repeated else {}
        names = ("cache_dtype", *(("draft_cache_dtype",) if k else ()))
        cache |= {name: scenario.caches[name] for name in names if scenario.caches[name] != "as_computed"}
        return {
            "who": who, "geometry": scenario.geometry, "pair": scenario.pair, "context": point.context,
            "batch": point.batch, "spec_k": k, "dtype": scenario.dtype, "device": scenario.device,
            "share": scenario.share if scenario.pair == "planted" and rule is None else None,
            "tokens": scenario.tokens, **cache, **forced, **stored, **repeated,
        }  # fmt: skip

    # -- what runs

    def session_len(self, point: Point) -> int:
        """Tokens a sequence may come to."""
        return point.context + self.scenario.tokens + HEADROOM

    def plan(self, target: TargetGeometry, draft: DraftGeometry, point: Point) -> memory.Plan:
        """What the point asks of the device's memory."""
        return memory.plan(
            target, draft, ks=self.scenario.ks, batch=point.batch, session_len=self.session_len(point),
            itemsize=getattr(torch, self.scenario.dtype).itemsize, n_peers=len(self._peer_keys()), device=self.device,
            draft_weights=self.scenario.draft_weights, target_weights=self.scenario.target_weights,
            **self.scenario.caches,
        )  # fmt: skip

    def _peer_keys(self) -> list[Key]:
        """Peers and their depths; Hugging Face has no EAGLE-3 to compare with."""
        depths = {"plain-torch": self.scenario.ks, "compiled-torch": self.scenario.ks, "hf-static": (0,)}
        return [(name, k) for name in self.scenario.peers for k in depths[name]]

    def _engines(self, source: PairSource, point: Point) -> dict[int, Work]:
        works = {k: self._work(source, point, k, self.scenario.tokens) for k in self.scenario.ks}
        for work in works.values() if not self.scenario.warmup else ():
            work.engine.runner.prepare()  # or the first round would pay for it
        return works

    def _work(self, source: PairSource, point: Point, k: int, n_tokens: int, *, rests: bool = True) -> Work:
        """An engine of `k` drafts whose session holds the context and `n_tokens` more, and its prompts."""
        session, share = point.context + n_tokens + HEADROOM, self.scenario.cache_share
        rule = self.scenario.rule(k)
        engine = source.engine(k, batch=point.batch, session_len=session, cache_share=share, rule=rule)
        prompts = source.prompts(point.batch, point.context, self.scenario.seed)
        return Work(engine, prompts, GenerationConfig(n_tokens, ignore_eos=True), rests=rests)

    def _contenders(self, source: PairSource, point: Point, reason: str | None) -> dict[Key, Contender]:
        def build(name: str, k: int) -> Peer:
            if reason is not None:
                raise MemoryError(reason)
            return self._peer(source, point, name, k)

        return {(name, k): Contender(partial(build, name, k)) for name, k in self._peer_keys()}

    def _peer(self, source: PairSource, point: Point, name: str, k: int) -> Peer:
        if source.target_geometry.block.experts is not None:
            raise ExperimentError("a target with experts beside a peer", "targets without", "use --peers none")
        target, draft = source.fused()
        first = torch.tensor([prompt[-1] for prompt in source.prompts(point.batch, 2, self.scenario.seed)])
        common: dict[str, Any] = {
            # In the middle of what the engine generates, so that both read as many keys on average.
            "context": point.context + self.scenario.tokens // 2,
            "first": first,
            "successor": source.planted.tokens.successor if source.planted else None,
            "n_steps": min(self.scenario.tokens, PEER_STEPS),
        }
        if name == "hf-static":
            from lab.probes.bench.peers.hf_static import HFStatic  # transformers take two seconds, which few need

            return HFStatic(target, source.target_geometry, **common)
        kind = {PlainTorch.name: PlainTorch, CompiledTorch.name: CompiledTorch}[name]
        return kind(target, draft, source.target_geometry, source.draft_geometry, k=k, **common)


def read_ceiling(device: torch.device) -> float:
    """GB/s that floors are read against: what is known of this kind of GPU, else the best plain read of this run."""
    known = known_gb_per_s(gpu_name(device))
    if known is not None:
        return known
    size = 2**30 if device.type == "cuda" else 2**26
    return max(found.gb_per_s for found in memory_ceilings(device.type, [size], repeats=9) if found.way == "read")


def about(source: PairSource, device: torch.device, gb_per_s: float) -> str:
    """What is measured, and against which ceiling, for people."""
    return f"{source.card}; {ceiling_words(gpu_name(device), gb_per_s)}"


def free(device: torch.device) -> None:
    """Give the memory of a finished point back, compiled graphs included."""
    gc.collect()
    if device.type == "cuda":
        reset: Any = torch.compiler.reset
        reset()
        torch.cuda.empty_cache()
