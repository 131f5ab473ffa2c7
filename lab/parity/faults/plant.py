"""An engine with one of the bugs in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eagle3core import Engine
from eagle3core.checkpoint import load_draft
from eagle3core.kernels import Call
from eagle3core.loading import new_runner
from eagle3core.step import Program, after_all
from eagle3core.weights import Drafter, PackedDraft, PackedTarget, pack_draft
from lab.errors import ExperimentError
from lab.parity.by_request import batch_of
from lab.parity.derived import passes_of
from lab.parity.faults.fault import PLANTED, Change, Fault, Place
from lab.parity.faults.of_books import BOOK_FAULTS
from lab.parity.faults.of_caches import CACHE_FAULTS
from lab.parity.faults.of_draft import DRAFT_FAULTS
from lab.parity.faults.of_experts import EXPERT_FAULTS
from lab.parity.faults.of_formats import FORMAT_FAULTS
from lab.parity.faults.of_layouts import LAYOUT_FAULTS
from lab.parity.faults.of_reach import REACH_FAULTS
from lab.parity.faults.of_serving import SERVING_FAULTS
from lab.parity.faults.of_target import TARGET_FAULTS
from lab.parity.faults.of_trees import TREE_FAULTS
from lab.parity.faults.run_fault import RunFault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (*TARGET_FAULTS, *EXPERT_FAULTS, *FORMAT_FAULTS, *DRAFT_FAULTS, *REACH_FAULTS, *LAYOUT_FAULTS)
}

RUN_FAULTS: dict[str, RunFault] = {
    fault.name: fault for fault in (*TREE_FAULTS, *BOOK_FAULTS, *SERVING_FAULTS, *CACHE_FAULTS)
}


def named(name: str) -> Fault:
    """The bug of that name.

    Raises:
        ExperimentError: no such bug.
    """
    if name not in FAULTS:
        known = ", ".join(sorted(FAULTS))
        raise ExperimentError(f"fault is {name!r}", f"one of {known}", "name one, or leave it empty")
    return FAULTS[name]


def plant(engine: Engine, name: str) -> Engine:
    """An engine like `engine` with the bug `name` in what it runs; `engine` itself stays right.

    What an engine says of its models is still the right thing, so whoever counts or compares does it by the truth.

    Raises:
        ExperimentError: no such bug, or one that the head cannot have.
    """
    fault = named(name)
    target, draft = engine.target, engine.draft
    if fault.target is not None:
        target = fault.target(target)
    if fault.draft is not None and draft is not None:
        draft = fault.draft(draft)
    if fault.misread is not None and draft is not None:
        target, draft = _misread(engine, fault)
    change = fault.remember() if fault.remember is not None else fault.change
    return _like(engine, target, draft, change)


def _misread(engine: Engine, fault: Fault) -> tuple[PackedTarget, PackedDraft]:
    """Both models with the head read again from its files and misread."""
    spec = engine.config.speculative_config
    assert fault.misread is not None, "asked for a misreading"
    if spec is None or spec.model is None or spec.method != "eagle3":
        raise ExperimentError(
            f"fault is {fault.name!r} where drafts are made by {spec.method if spec else 'nobody'}",
            "a misreading of an EAGLE-3 head", "give such a head, or name another bug",
        )  # fmt: skip
    target = engine.target
    head = fault.misread(load_draft(
        spec.model, target.geometry, capture_layers=spec.capture_layers, capture_convention=spec.capture_convention,
        norm_output=spec.norm_output, dtype=target.dtype, device=target.device,
    ))  # fmt: skip
    target = replace(target, taps=head.geometry.taps)
    block = engine.config.block_size
    return target, pack_draft(head.geometry, head.weights.pop, head.draft_to_target, target, block=block)


def plant_in_run(engine: Engine, name: str) -> Engine:
    """An engine like `engine` with the bug `name` of `RUN_FAULTS` in its steps or its books; `engine` stays right.

    Raises:
        ExperimentError: no such bug.
    """
    fault = run_fault(name)
    spoiled = _like(engine, engine.runner.target, engine.runner.draft, fault.change)
    if fault.spoil is not None:
        fault.spoil(spoiled)
    return spoiled


def with_fault(engine: Engine, name: str) -> Engine:
    """The engine, or with a `name` one like it with that bug of either table.

    Raises:
        ExperimentError: no such bug.
    """
    if not name:
        return engine
    return plant_in_run(engine, name) if name in RUN_FAULTS else plant(engine, name)


def run_fault(name: str) -> RunFault:
    """The bug of that name that whole runs show.

    Raises:
        ExperimentError: no such bug.
    """
    if name not in RUN_FAULTS:
        known = ", ".join(sorted(RUN_FAULTS))
        raise ExperimentError(f"fault is {name!r}", f"one of {known}", "name one of them")
    return RUN_FAULTS[name]


def _like(engine: Engine, target: PackedTarget, draft: Drafter | None, change: Change | None) -> Engine:
    """An engine with other models or other programs that says of itself what `engine` says."""
    runner = new_runner(target, draft, engine.config, engine.runner.sizes.n_blocks)
    if change is not None:
        runner.change_programs(lambda program: changed(program, change))
    return Engine(
        engine.target,
        engine.draft,
        engine.config,
        trace=engine.trace,
        tokenizer=engine.tokenizer,
        backend=engine.backend,
        speculation=engine.speculation,
        memory_plan=engine.memory_plan,
        runner=runner,
    )


def changed(program: Program, change: Change) -> Program:
    """The program with `change(place, call)` in the place of every call."""
    batch, stages = batch_of(program), []
    for stage, at in zip(program, passes_of(program), strict=True):
        place = Place(stage.name, at.scope, batch)
        calls = [made for call in stage.calls for made in change(place, call)]
        stages.append(replace(stage, calls=tuple(_after_edits(calls))))
    return tuple(stages)


def _after_edits(calls: Sequence[Call]) -> list[Call]:
    """The calls, of which the one after an edit waits for it."""
    follows = [False, *(call.op == PLANTED for call in calls)]
    return [after_all([call])[0] if waits else call for call, waits in zip(calls, follows, strict=False)]
