"""`eagle3lab sweep shapes|gemm|fmha`: log shapes, time settings, write the tuned file, or build the kernels ahead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from eagle3core.kernels import cubins, tuned
from eagle3core.step import write_shapes
from lab.ending import tell_summary
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED, EXIT_UNDECIDED, ExperimentError
from lab.options.sweeps import FmhaOptions, GemmOptions, ShapesOptions, SweepOptions
from lab.options.values import read_points
from lab.pairs.planted import find_geometry, share_for_length
from lab.probes.bench.scenario import Scenario
from lab.probes.bench.source import HEADROOM
from lab.probes.proofs.plans import shapes_of
from lab.probes.proofs.subject import Setting
from lab.probes.sweeps.bake import bake, complaints
from lab.probes.sweeps.choose import choose_all
from lab.probes.sweeps.confirm import MicroRuns
from lab.probes.sweeps.joint import joint_table
from lab.probes.sweeps.machines import GpuMachine, Machine, TwinMachine, variants_of
from lab.probes.sweeps.measure import Sweep
from lab.probes.sweeps.regimes import HEADS, TINY, AttentionGrid, Regime, attention_regimes, gemm_regimes, load_shapes
from lab.probes.sweeps.rows import AGAINST, SCREEN, SweepWriter, read_sweep

Op = Literal["gemm", "attention"]
NAMES: dict[Op, str] = {"gemm": "gemm", "attention": "fmha"}  # of the command, by the card


def sweep_gemm(options: GemmOptions) -> int:
    """Sweeps matrix products; 0, or 1 if bits differed, or 4 if something could not be decided."""
    return _swept("gemm", options)


def sweep_fmha(options: FmhaOptions) -> int:
    """Sweeps attention; codes as of matrix products."""
    return _swept("attention", options)


def log_shapes(options: ShapesOptions) -> int:
    """Products of the engines of a scenario, from their programs: no GPU, no weights."""
    subject = shapes_of(find_geometry(options.geometry), options.arch)
    options.out.unlink(missing_ok=True)
    for point in options.at:
        for k in options.spec:
            session = point.context + options.micro_tokens + HEADROOM
            runner = subject.runner(Setting(k, point.batch, session, chunk=options.prefill_chunk))
            counts = {product: n for product, n in runner.gemms.counts.items() if product.m >= options.least_rows}
            write_shapes(options.out, counts)
    found = load_shapes(options.out)
    tags = sorted({product.tag for product in found})
    tell_summary({"command": "sweep shapes", "n_shapes": len(found), "tags": tags})
    return EXIT_PASSED


def _swept(op: Op, options: SweepOptions) -> int:
    if options.build is not None:
        return _build(op, options, options.build)
    if options.rows is not None:
        return conclude(op, options, options.rows, options.arch, is_whole=True)
    assert options.out is not None, "the options name a file for rows"
    machine = machine_of(options.device)
    writer = SweepWriter(options.out, machine.gpu, machine.timer)
    attention = options if isinstance(options, FmhaOptions) else None
    sweep = Sweep(
        machine, writer, deadline=time.monotonic() + options.limit_s,
        counts_tiles=attention is not None and attention.tile_stats, is_ab=attention is not None and attention.ab,
    )  # fmt: skip
    regimes = _regimes(machine.arch, options)
    is_whole = sweep.run(regimes)
    if attention is not None and attention.orders:
        sweep.joint(_of_dim(regimes, attention.orders_dim), attention.orders)
        print("\n".join(joint_table(writer.cells)))
    if options.confirm:
        MicroRuns(writer, op, machine.arch, _scenario(options, machine)).run()
    return conclude(op, options, options.out, machine.arch, is_whole=is_whole)


def machine_of(device: str) -> Machine:
    """What times; "auto" is the GPU where there is one.

    Raises:
        ExperimentError: CUDA was asked for and is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ExperimentError("device is 'cuda' and torch sees none", "auto or cpu (the twin)", "use --device auto")
    return GpuMachine() if device != "cpu" and torch.cuda.is_available() else TwinMachine()


def _regimes(arch: str, options: SweepOptions) -> list[Regime]:
    if isinstance(options, GemmOptions):
        assert options.shapes is not None, "the options name a shape log"
        return gemm_regimes(arch, load_shapes(options.shapes), options.top)
    assert isinstance(options, FmhaOptions), "there are two sweeps"
    return attention_regimes(arch, grid_of(options))


def grid_of(options: FmhaOptions) -> AttentionGrid:
    """The shapes that are asked for; without a GPU, and nothing to build, what a CPU can emulate."""
    if options.build is None and options.device != "cuda" and not torch.cuda.is_available():
        return TINY
    points = tuple((point.batch, point.context) for point in options.at)
    heads, fp8 = {dim: HEADS[dim] for dim in options.dims}, options.cache_dtype == "fp8"
    return AttentionGrid(heads, points, options.tokens, fp8=fp8)


def _of_dim(regimes: Sequence[Regime], dim: int) -> list[Regime]:
    return [one for one in regimes if one.cases[0]["dim"] == dim] or list(regimes)


def _build(op: Op, options: SweepOptions, out: Path) -> int:
    regimes = _regimes(options.arch, options)
    wanted = {
        variant.name: variant
        for regime in regimes for case in regime.cases for setting in regime.settings
        for variant in variants_of(op, options.arch, case, setting)
    }  # fmt: skip
    if isinstance(options, FmhaOptions):
        for regime in regimes if options.tile_stats else ():
            for case in regime.cases:
                counting = {**case, "counting": True}
                wanted |= {one.name: one for one in variants_of(op, options.arch, counting, regime.default)}
        for regime in _of_dim(regimes, options.orders_dim) if options.orders else ():
            for case in regime.cases:
                for order in options.orders:
                    wanted |= {one.name: one for one in variants_of(op, options.arch, {**case, "order": order}, {})}
    which, of = options.share
    made = cubins.build_cubins(list(wanted.values())[which - 1 :: of], options.arch, out, tell=print)
    tell_summary({"command": f"sweep {NAMES[op]}", "wanted": len(wanted), "built": made})
    return EXIT_PASSED


def _scenario(options: SweepOptions, machine: Machine) -> Scenario:
    on_gpu = machine.device.type == "cuda"
    return Scenario(
        geometry=options.geometry if on_gpu else "nano", pair="planted",
        points=options.at if on_gpu else read_points("32x1"), ks=(0, options.depth),
        share=share_for_length(options.acceptance_length, options.depth), tokens=options.micro_tokens,
        rounds=options.rounds, warmup=0, dtype="bfloat16" if on_gpu else "float32", device=machine.device.type,
        peers=(),
    )  # fmt: skip


def conclude(op: Op, options: SweepOptions, rows: Path, arch: str, *, is_whole: bool) -> int:
    """What was chosen, in words and as a summary; the tuned file if one is asked for."""
    sweep = read_sweep(rows)
    choices, missing = choose_all(sweep.cells, op)
    if not choices and not missing:
        raise ExperimentError(f"{sweep.name} has no rows of {op}", "rows of its sweep", f"eagle3lab sweep {NAMES[op]}")
    unequal = [row["regime"] for row in sweep.of(op, SCREEN) if not row["bits_equal"]]
    unlike = [row["regime"] for row in sweep.of(op, AGAINST) if not row["passes"]]
    for choice in choices:
        kept = "keeps the default" if choice.is_default else "changes"
        print(f"{choice.regime}: {kept}, {choice.reason}; {choice.baked_us:.2f} us")
    wrong = complaints(choices, missing)
    print("\n".join(wrong))
    if options.bake is not None:
        content = bake(options.bake, choices, sweep, rows, arch)
        tuned.read_artifact(options.bake)
        print(f"{options.bake.name}: {len(content.get(op, []))} entries of {op}")
    changed = sum(not choice.is_default for choice in choices)
    tell_summary({
        "command": f"sweep {NAMES[op]}", "regimes": len(choices), "changed": changed, "unequal_bits": len(unequal),
        "unlike_reference": len(unlike), "undecided": len(wrong), "is_whole": is_whole,
    })  # fmt: skip
    if unequal or unlike:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if is_whole and not wrong else EXIT_UNDECIDED
