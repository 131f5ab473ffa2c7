"""Performance mode: seven promises of a run, each with a name, a check, and an error that names it.

With `EAGLE3_PERF_MODE` set an engine is kept to what its speed is claimed under: what would quietly be slower, or other
tokens, ends the run. Without it the engine goes on as it can. Every check stands here; `Watch` makes those that an
engine can make of itself, the lab the others, by the same names. Source: docs/requirements.md R-113, R-116.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from eagle3core.backend import Backend
from eagle3core.config import EngineConfig
from eagle3core.errors import InvariantViolated
from eagle3core.kernels.slots.slot_state import result_width
from eagle3core.loading import SpeculationState
from eagle3core.performance.active_counts import ActiveCounts
from eagle3core.performance.invariants import violated
from eagle3core.step.gemm_audit import GemmAudit
from eagle3core.step.outcome import RowOutcome
from eagle3core.step.run import DeviceRunner
from eagle3core.trace import RecordingTrace, Trace

log = logging.getLogger("eagle3core")

VARIABLE = "EAGLE3_PERF_MODE"  # set: a broken invariant ends the run
RESULT_AXES = ("turn", "slot", "number")
MOST_NAMED = 3  # products in an error
ALLOWED_IN_A_STEP = {"event_waits": 1}  # the wait for the results of the step before; of anything else, none


def is_on() -> bool:
    """Whether a broken invariant ends the run."""
    return bool(os.environ.get(VARIABLE))


def debug_variables() -> list[str]:
    """Variables `EAGLE3_*_DEBUG` that are set."""
    return sorted(n for n, value in os.environ.items() if n.startswith("EAGLE3_") and n.endswith("_DEBUG") and value)


def debug_settings(config: EngineConfig, trace: Trace | None = None) -> list[str]:
    """Settings that make a step log or copy, by name."""
    spec = config.speculative_config
    found = [name for name in ("collect_draft_ranks", "collect_last_states") if getattr(config, name)]
    found += ["acceptance_log"] if config.acceptance_log is not None else []
    found += [name for name in ("eagle_debug", "eagle_metrics_debug") if spec is not None and getattr(spec, name)]
    return [*found, *(["a recording trace"] if isinstance(trace, RecordingTrace) else [])]


def check_products(backend: Backend, runner: DeviceRunner) -> None:
    """(1) On a GPU the products are the engine's own; a CPU has nothing to fall back from.

    Raises:
        InvariantViolated: plain torch computes on a GPU.
    """
    if backend.device.type == "cuda" and not runner.has_kernels:
        raise violated("gemm_fallbacks", f"plain torch multiplies on the GPU: {backend.path_reason}")


def check_tuned(audit: GemmAudit) -> None:
    """(2) Every product has an entry in the tuned file of this kind of GPU; without a file there is nothing to miss.

    Raises:
        InvariantViolated: some have none.
    """
    if audit.misses:
        missed = sum(audit.counts[product] for product in audit.misses)
        what = f"{missed} of {audit.total} matrix products are not in the tuned file: "
        what += ", ".join(product.text for product in audit.misses[:MOST_NAMED])
        raise violated("untuned_products", what)


def check_depth(asked: int, runner: DeviceRunner, speculation: SpeculationState) -> None:
    """(3) Steps draft what was asked for.

    Raises:
        InvariantViolated: they draft less, or nothing.
    """
    if asked and not speculation.enabled:
        raise violated("single_token_steps", f"{asked} drafts were asked for and there are none: {speculation.reason}")
    if runner.n_drafts < asked:
        raise violated("single_token_steps", f"steps draft {runner.n_drafts} tokens where {asked} were asked for")


def broken_by_fault(slot: int, fault: int, step: int) -> InvariantViolated:
    """(4) What a fault that the device reported means."""
    allowed = "acceptance inside the tree (1), a block for every row (2), room for the root (4), finite logits (8)"
    return violated("faults", f"slot {slot} reports fault {fault} in step {step}", allowed)


def check_layout(name: str, shape: Sequence[int], expected: Mapping[str, int | None]) -> None:
    """(5) An output has the axes it is read by.

    Args:
        expected: size of each axis, None for any.

    Raises:
        InvariantViolated: another number of axes, or another size.
    """
    sizes = list(expected.values())
    if len(shape) != len(sizes) or any(want not in (None, got) for got, want in zip(shape, sizes, strict=True)):
        words = " x ".join(f"{axis}={'any' if size is None else size}" for axis, size in expected.items())
        raise violated("guessed_layouts", f"{name} has the shape {list(shape)}", words)


def check_row(row: RowOutcome, n_drafts: int) -> None:
    """(5) A step's row says itself which tokens are its own: so many of a chain's drafts, then the bonus.

    Raises:
        InvariantViolated: a count that is none of this chain, or tokens that do not begin with the accepted drafts, as
            in a row that is read at the wrong places.
    """
    if not 0 <= row.n_accepted <= n_drafts:
        raise violated("guessed_layouts", f"slot {row.slot} accepted {row.n_accepted} of {n_drafts} drafts")
    check_layout(f"the tokens of slot {row.slot}", [len(row.tokens)], {"accepted and bonus": row.n_accepted + 1})
    accepted, drafted = row.tokens[:-1], row.drafts[: row.n_accepted]
    if accepted != drafted:
        raise violated("guessed_layouts", f"slot {row.slot} accepted {accepted} of the drafts {drafted}")


def check_switches(config: EngineConfig, trace: Trace | None = None) -> None:
    """(6) Nothing logs or copies inside steps, unless a variable `EAGLE3_*_DEBUG` asks for it.

    Raises:
        InvariantViolated: a setting does.
    """
    found = debug_settings(config, trace)
    if found and not debug_variables():
        raise violated("debug_switches", f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} on")


def loud(counts: Mapping[str, int]) -> dict[str, int]:
    """(6) Of what a step was seen to do, by name, how much is more than it may."""
    return {name: n for name, n in counts.items() if n > ALLOWED_IN_A_STEP.get(name, 0)}


def check_quiet(counts: Mapping[str, int], where: str) -> None:
    """(6) A step, as a profile saw it, copied nothing to the host and waited for nothing but the step before.

    Raises:
        InvariantViolated: it did, and no variable asked for it.
    """
    found = loud(counts)
    if found and not debug_variables():
        raise violated("debug_switches", f"{where}: {', '.join(f'{n} {name}' for name, n in found.items())}")


def check_same(runs: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """(7) Greedy tokens are the same in every run: twice the same engine, with drafts and without.

    Args:
        runs: tokens of every request, by what made them; runs may end at different lengths.

    Raises:
        InvariantViolated: two runs that differ.
    """
    (first, expected), *others = runs.items()
    for name, tokens in others:
        if len(tokens) != len(expected):
            raise violated("divergent_tokens", f"{name} answers {len(tokens)} requests, {first} {len(expected)}")
        for request, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
            at = first_difference(ours, theirs)
            if at is not None:
                what = f"{name} has token {ours[at]} at {at} of request {request}, {first} {theirs[at]}"
                raise violated("divergent_tokens", what)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two sequences part; None if one begins the other."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """(6) Inside, an operation that reads a device's memory on the host is refused before it runs.

    Sees what torch dispatches: `.item()`, `.tolist()`, `.cpu()`, copies. Waits that it does not dispatch, such as those
    for streams, are found by the audit of profiles (`eagle3lab prove quiet`).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_on_host(func, args, kwargs or {}):
            raise violated("debug_switches", f"{func} ran inside a step")
        return func(*args, **(kwargs or {}))


def reads_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation brings numbers from a device to the host."""
    aten = torch.ops.aten
    if func is aten._local_scalar_dense.default:
        return True
    if func is aten._to_copy.default:
        wanted = kwargs.get("device")
        return wanted is not None and torch.device(wanted).type == "cpu" and args[0].device.type != "cpu"
    return func is aten.copy_.default and args[0].device.type == "cpu" and args[1].device.type != "cpu"


class Greedy:
    """(7) Tokens that a target gave before, by prompt, so that whoever runs it again must give the same."""

    MOST = 64  # prompts of a target, the oldest forgotten

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()  # by the target's table, which engines with and without drafts share

    def check(self, weights: Tensor, order: object, prompt: Sequence[int], tokens: Sequence[int], who: str) -> None:
        """Hold an answer against the one given before, and keep the longer.

        Raises:
            InvariantViolated: they differ.
        """
        known: dict[object, tuple[str, list[int]]] = self._known.setdefault(weights, {})
        key = (order, tuple(prompt))
        before = known.get(key)
        if before is not None:
            check_same({f"{before[0]}, earlier": [before[1]], who: [tokens]})
        if before is None or len(tokens) > len(before[1]):
            known.pop(key, None)
            known[key] = (who, list(tokens))
        while len(known) > self.MOST:
            del known[next(iter(known))]


_greedy = Greedy()


class Watch:
    """The checks that an engine makes of itself, all of them nothing outside performance mode.

    Attributes:
        guards_steps: whether host reads inside steps are looked for; plain torch on a CPU is made of them.
    """

    def __init__(
        self, config: EngineConfig, backend: Backend, runner: DeviceRunner, speculation: SpeculationState
    ) -> None:
        self.config, self.backend, self.runner, self.speculation = config, backend, runner, speculation
        self.guards_steps = backend.device.type == "cuda"
        self.counts = ActiveCounts(runner.n_slots)
        self._guard = NoHostReads()  # type: ignore[no-untyped-call]
        self._answers: list[tuple[Sequence[int], Sequence[int]]] = []

    def begin(self, trace: Trace) -> None:
        """When the first request reaches an empty engine: a count begins, after what `check` looks at."""
        if is_on():
            self.counts, self._answers = ActiveCounts(self.runner.n_slots), []
            self.check(trace)

    def check(self, trace: Trace) -> None:
        """Before a request waits: invariants 1, 2, 3, 5 and 6 as far as they show beforehand."""
        if not is_on():
            return
        spec = self.config.speculative_config
        check_products(self.backend, self.runner)
        check_depth(spec.n_nodes - 1 if spec else 0, self.runner, self.speculation)
        check_switches(self.config, trace)
        check_tuned(self.runner.gemms)
        sizes, results = self.runner.sizes, self.runner.state.results
        width = result_width(sizes.path_len, sizes.nodes)
        check_layout("results", results.shape, dict(zip(RESULT_AXES, (None, sizes.n_slots, width), strict=True)))

    def step(self, n_active: int) -> AbstractContextManager[object]:
        """Around what enqueues a step of `n_active` slots: invariant 6."""
        if is_on():
            self.counts.active.append(n_active)
        return self._guard if self.guards_steps and is_on() and not debug_variables() else nullcontext()

    def row(self, row: RowOutcome) -> None:
        """Of every row that a step gave: invariant 5."""
        if is_on() and not row.fault:
            check_row(row, self.runner.n_drafts)
            self.counts.n_rows += 1
            self.counts.n_accepted += row.n_accepted

    def answered(self, weights: Tensor, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Of every request that ended: keep it for invariant 7, where bits are promised."""
        if is_on() and self.runner.has_kernels:
            self._answers.append((prompt, tokens))
            if len(self._answers) >= Greedy.MOST:  # an engine that is never empty must not keep all it has answered
                self._compare(weights)

    def end(self, weights: Tensor) -> None:
        """When the engine is empty again: a line of its slots and acceptance, and invariant 7."""
        if is_on():
            log.info("[EAGLE][Active] %s", self.counts.line())
            self._compare(weights)

    def _compare(self, weights: Tensor) -> None:
        answers, self._answers = self._answers, []
        who = f"spec-{self.runner.n_drafts}" if self.runner.n_drafts else "plain decoding"
        for prompt, tokens in answers:
            _greedy.check(weights, self.runner.emit.order, prompt, tokens, who)
