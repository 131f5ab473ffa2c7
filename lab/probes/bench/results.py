"""What one point gave, and the row values that follow from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lab.errors import RunFailed
from lab.pairs.planted.tokens import expected_length
from lab.probes.bench.clocks import SPANS, SpanClock
from lab.probes.bench.floors import UNIFORM, Floor, Routing, step_floor
from lab.probes.bench.peers import Peer, PeerRound
from lab.probes.bench.peers.plain_torch import KNOWN_GPU, KNOWN_MS
from lab.probes.bench.record import scenario_block, speculation_block, spread_block
from lab.probes.bench.rounds import FullWindow, Round, Spread, Sustained, Work, acceptance_length, within_rounds
from lab.probes.bench.routed import count_experts, routing_values
from lab.probes.bench.scenario import Point, Scenario
from lab.probes.bench.source import PairSource
from lab.probes.ceilings import gpu_name
from lab.probes.kernels.reading.ceiling import RunCeiling
from lab.rows.store import block

SPREAD = ("_p10", "_p90", "_samples")  # ends of the names that stand beside a median
AGREEMENT = 1.05  # between the plain-torch peer and what is known of it
Key = tuple[str, int]  # a peer's name and its drafts a step


@dataclass
class PeerResult:
    """What a peer gave: its rounds, or the reason why there are none."""

    peer: Peer | None
    rounds: list[PeerRound]
    reason: str | None

    @property
    def steps(self) -> Spread:
        """Time of a step, milliseconds."""
        return Spread(tuple(result.step_ms for result in self.rounds))


@dataclass
class PointResult:
    """Everything measured at one point.

    Attributes:
        works: engines by depth, as their last round left them.
        rounds: of each depth, in the order measured.
        peers: by name and depth.
        gb_per_s: read ceiling that runs are compared against. run_ceiling: the one of this run, after the rounds.
        sustained: steps without a rest by depth, where they were asked for.
        spans: depths whose steps are taken apart, in one more pass; None: all.
    """

    scenario: Scenario
    source: PairSource
    point: Point
    works: dict[int, Work]
    rounds: dict[int, list[Round]]
    peers: dict[Key, PeerResult]
    gb_per_s: float
    run_ceiling: RunCeiling
    sustained: Mapping[int, Sustained] = field(default_factory=dict)
    spans: Collection[int] | None = None
    _counted: dict[int, float | None] = field(default_factory=dict, repr=False)  # distinct experts, by depth

    def full(self, k: int) -> list[FullWindow]:
        """The full part of every round at depth `k`.

        Raises:
            RunFailed: a round had none.
        """
        windows = [result.full for result in self.rounds[k] if result.full is not None]
        if len(windows) < len(self.rounds[k]):
            raise RunFailed(
                "a round had no step with every slot in use", "enough tokens for several full steps", "raise --tokens"
            )
        return windows

    def floor(self, k: int, n_tokens: int | None = None) -> Floor:
        """Necessary bytes of a step, at the mean length of what it generated on: `n_tokens`, or a round's."""
        generated = self.scenario.tokens if n_tokens is None else n_tokens
        itemsize = getattr(torch, self.scenario.dtype).itemsize
        return step_floor(
            self.source.target_geometry, self.source.draft_geometry, k=k, batch=self.point.batch,
            cached=self.point.context + generated / 2, itemsize=itemsize,
            draft_weights=self.source.draft.weights, target_weights=self.source.target.weights,
            routing=self.routing(k), **self.source.caches,
        )  # fmt: skip

    def routing(self, k: int) -> Routing:
        """What a step of `k` drafts and a plain one chose, counted once where the target has experts."""
        if self.source.target_geometry.block.experts is None:
            return UNIFORM
        for depth in {0, k} & set(self.works) - set(self._counted):
            self._counted[depth] = count_experts(self.works[depth], depth)
        counted = {depth + 1: n for depth in (0, k) if (n := self._counted.get(depth)) is not None}
        return replace(self.source.routing, measured=counted)

    def _routing_values(self, k: int) -> dict[str, Any]:
        experts = self.source.target_geometry.block.experts
        return {} if experts is None else routing_values(experts, self.routing(k), k, self.point.batch)

    def engine_values(self, k: int) -> dict[str, Any]:
        """Row values of the engine at depth `k`."""
        work, windows = self.works[k], self.full(k)
        steps = Spread(tuple(window.step_ms for window in windows))
        speed = Spread(tuple(window.tokens_per_s for window in windows))
        floor_ms = self.floor(k).ms(self.gb_per_s)
        is_spanned = self.spans is None or k in self.spans
        rule = self.scenario.rule(k)
        missing = [f"{name} at {depth} drafts: {one.reason}" for (name, depth), one in self.peers.items() if one.reason]
        return {
            **speed.values("decode_tokens_per_s"),
            **_step_values(steps),
            "floor_ms": floor_ms,
            "share_of_floor": floor_ms / steps.median,
            "ceiling_gb_per_s": self.gb_per_s,
            **self.run_ceiling.values(),
            "share_of_run_ceiling": self.floor(k).ms(self.run_ceiling.gb_per_s) / steps.median,
            **self._sustained_values(k, floor_ms / steps.median),
            "prefill_s": Spread(tuple(result.prefill_s for result in self.rounds[k])).median,
            "n_steps": windows[0].n_steps,
            "total_runs": len(windows),
            **(self._speculative_values(k, steps) if k else {}),
            **self._against_peers(k, steps),
            **({} if rule is None else {"acceptance": rule.label}),
            # What is forced is nobody's text: it is like the baseline's by chance alone.
            "n_divergent": self._n_divergent(work) if rule is None else None,
            "n_wrong_requests": self.source.n_wrong(work.prompts, work.tokens) if rule is None else None,
            "is_complete": not missing,
            "incomplete": missing,
            **scenario_block(self.scenario, self.point, k),
            **spread_block("latency_ms_per_token", [1e3 * self.point.batch / one.tokens_per_s for one in windows]),
            **spread_block("throughput_tokens_per_sec", speed.samples),
            **speculation_block(work.responses, k),
            **self._routing_values(k),
            **({f"stage_ms.{name}": ms for name, ms in stage_ms(work).items()} if is_spanned else {}),
        }

    def _sustained_values(self, k: int, rested_share: float) -> dict[str, Any]:
        """The pass without a rest, if one was asked for; over the rested share, below 1, is what heat took."""
        if k not in self.sustained:
            return {}
        one = self.sustained[k]
        if one.window is None:
            return {"sustained.missing": one.reason}
        step_ms, floor = one.window.step_ms, self.floor(k, one.n_tokens)
        share = floor.ms(self.gb_per_s) / step_ms
        values = {
            "n_steps": one.window.n_steps, "n_tokens": one.n_tokens, "step_ms_mean": step_ms, "share_of_floor": share,
            "share_of_run_ceiling": floor.ms(self.run_ceiling.gb_per_s) / step_ms,
            "over_rested_share": share / rested_share, **one.clocks,
        }  # fmt: skip
        return block("sustained", values)

    def _n_divergent(self, work: Work) -> int:
        """Requests whose tokens are not the baseline's."""
        return sum(a != b for a, b in zip(work.tokens, self.works[0].tokens, strict=True))

    def _speculative_values(self, k: int, steps: Spread) -> dict[str, Any]:
        base, floor = self.full(0), self.floor(k)
        ratio = within_rounds(steps.samples, [one.step_ms for one in base])
        gain = within_rounds([one.tokens_per_s for one in self.full(k)], [one.tokens_per_s for one in base])
        whole = within_rounds(
            [one.tokens_per_s for one in self.rounds[k]], [one.tokens_per_s for one in self.rounds[0]]
        )
        length = acceptance_length(self.works[k].responses)
        planted = self.source.planted
        # What chance did to one round's acceptance is in `speedup`; at the planted one only the step's cost is left.
        has_dial = planted is not None and self.scenario.forced is None
        share = planted.tokens.share if planted is not None else 0.0
        at_dial = {"speedup_at_dial": expected_length(share, k) / ratio.median} if has_dial else {}
        return {
            **at_dial,
            **ratio.values("step_over_base"),
            "step_over_base_bound": floor.step_over_base,
            **gain.values("speedup"),
            **whole.values("with_prefill_speedup"),
            "speedup_bound": floor.largest_speedup(length or 1.0),
            "acceptance_length": length,
        }

    def _against_peers(self, k: int, steps: Spread) -> dict[str, Any]:
        """Our step over each peer's at the same depth, within each round."""
        found: dict[str, Any] = {}
        for (name, depth), one in self.peers.items():
            if depth == k and one.rounds:
                found |= within_rounds(steps.samples, one.steps.samples).values(f"over_{name}")
        return found

    def peer_values(self, key: Key) -> dict[str, Any]:
        """Row values of a peer that was measured."""
        (name, k), one = key, self.peers[key]
        assert one.peer is not None, "a peer that was measured was built"
        last = one.rounds[-1]
        # A trained draft accepts by what is in the cache, and a peer's cache is random: only a planted one's counts.
        length = last.tokens_per_step if k == 0 or self.source.planted is not None else None
        values = {
            **_step_values(one.steps),
            "decode_tokens_per_s": None if length is None else 1e3 * self.point.batch * length / one.steps.median,
            "tokens_per_step": length,
            "n_wrong_requests": last.n_wrong,
            **one.peer.facts(),
        }
        if name == "plain-torch" and self.scenario.geometry == "llama-3.1-8b" and k in (0, 3):
            gpu, known = gpu_name(torch.device(self.scenario.device)), self._known_ms
            if known and KNOWN_GPU in (gpu or ""):
                values |= agreement(one.steps.median, known[1 if k else 0], str(values["attention"]))
        return values

    @property
    def _known_ms(self) -> tuple[float, float] | None:
        return KNOWN_MS.get((self.point.context, self.point.batch))


def agreement(step_ms: float, known_ms: float, attention: str) -> dict[str, Any]:
    """Whether the peer is as fast as it is known to be, and what to look at if not."""
    ratio = step_ms / known_ms
    agrees = 1 / AGREEMENT <= ratio <= AGREEMENT
    why = "" if agrees else f"{ratio - 1:+.1%} of {known_ms} ms with torch {torch.__version__}, attention {attention}"
    return {"known_step_ms_on_h200": known_ms, "over_known": ratio, "agrees_with_known": agrees, "why_not": why}


def stage_ms(work: Work) -> Mapping[str, float]:
    """Own time of every stage in a step, from one more pass in which stages run one by one."""
    clock = SpanClock(work.engine.target.device)
    kept = work.responses
    work.decode(clock)
    work.responses = kept
    names = [*(name for name in SPANS if name in clock.bars_us), *(n for n in clock.bars_us if n not in SPANS)]
    return {name: clock.bars_us[name] / clock.n_steps / 1e3 for name in names}


def line_of(name: str, values: Mapping[str, Any]) -> str:
    """An engine's row for people."""
    text = f"{name}: {values['step_ms_median']:.3f} ms a step, {values['share_of_floor']:.1%} of the floor"
    if "share_of_run_ceiling" in values:
        text += f" ({values['share_of_run_ceiling']:.1%} at this run's {values['ceiling_of_run_gb_per_s']:.0f} GB/s)"
    if "sustained.share_of_floor" in values:
        text += f", {values['sustained.share_of_floor']:.1%} over {values['sustained.n_steps']} steps without a rest"
    if "speedup" in values:
        text += (
            f"; step/base {values['step_over_base']:.3f} (bound {values['step_over_base_bound']:.3f}), "
            f"decoding only {values['speedup']:.2f}x, with prefill {values['with_prefill_speedup']:.2f}x at "
            f"{values['acceptance_length'] or 0:.2f} tokens a step"
        )
    if "acceptance" in values:
        text += f", acceptance {values['acceptance']}: the text means nothing"
    if "speedup_at_dial" in values:
        text += f", {values['speedup_at_dial']:.2f}x at the planted acceptance"
    for key, value in values.items():
        if key.startswith("over_") and not key.endswith(SPREAD):
            text += f"; {value:.3f} of {key.removeprefix('over_')}'s time"
    return text + (f"; WRONG TOKENS: {wrong_tokens(values)}" if wrong_tokens(values) else "")


def wrong_tokens(values: Mapping[str, Any]) -> str:
    """What is wrong with a row's tokens, in words; empty if nothing is."""
    words = {"n_divergent": "requests unlike the baseline's", "n_wrong_requests": "requests not as planted"}
    return ", ".join(f"{values[name]} {text}" for name, text in words.items() if values.get(name))


def _step_values(steps: Spread) -> dict[str, Any]:
    """A step's time, named so that it is not compared between runs: a longer one may commit more."""
    return {
        "step_ms_median": steps.median,
        "step_ms_p10": steps.p10,
        "step_ms_p90": steps.p90,
        "step_ms_samples": list(steps.samples),
    }
