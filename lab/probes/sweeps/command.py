"""`eagle3lab sweep shapes|gemm|fmha`: log shapes, time settings, write the tuned file, or build the kernels ahead."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3core.kernels import ARCHES, cubins, tuned
from eagle3core.step import write_shapes
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED, EXIT_UNDECIDED, ExperimentError
from lab.pairs.planted import GEOMETRIES, find_geometry, share_for_length
from lab.probes.bench import scenario as scenarios
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

OPS = {"gemm": "gemm", "fmha": "attention"}
TILE_STATS_VARIABLE = "EAGLE3_FMHA_TILE_STATS"  # docs/requirements.md R-109
AB_VARIABLE = "EAGLE3_FMHA_AB"


def main(arguments: Sequence[str]) -> int:
    """Sweeps; 0, or 1 if bits differed, or 4 if something could not be decided."""
    given = _parser().parse_args(list(arguments))
    if given.out is None and given.rows is None and given.build is None:
        raise ExperimentError(
            "neither --out, --rows nor --build", "one of them", "name the file that rows are added to: --out FILE"
        )
    if given.what == "shapes":
        return _shapes(given)
    op = OPS[given.what]
    if given.build is not None:
        return _build(op, given)
    if given.rows is not None:
        if given.confirm:
            raise ExperimentError("--confirm with --rows", "--confirm with --out", "micro runs add rows to --out")
        return _conclude(op, given, given.rows, is_whole=True)
    machine = machine_of(given.device)
    writer = SweepWriter(given.out, machine.about())
    sweep = Sweep(
        machine, writer, deadline=time.monotonic() + given.limit_s,
        counts_tiles=given.tile_stats or bool(os.environ.get(TILE_STATS_VARIABLE)),
        is_ab=given.ab or bool(os.environ.get(AB_VARIABLE)),
    )  # fmt: skip
    regimes = _regimes(op, machine.arch, given)
    is_whole = sweep.run(regimes)
    if op == "attention" and given.orders:
        sweep.joint(_of_dim(regimes, given.orders_dim), read_orders(given.orders))
        print("\n".join(joint_table(writer.rows)))
    if given.confirm:
        MicroRuns(writer, op, machine.arch, _scenario(given, machine)).run()
    return _conclude(op, given, given.out, is_whole=is_whole)


def machine_of(device: str) -> Machine:
    """What times; "auto" is the GPU where there is one.

    Raises:
        ExperimentError: CUDA was asked for and is not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ExperimentError("device is 'cuda' and torch sees none", "auto or cpu (the twin)", "use --device auto")
    return GpuMachine() if device != "cpu" and torch.cuda.is_available() else TwinMachine()


def read_orders(text: str) -> list[tuple[int, int]]:
    """Orders of sums written as `32x4,8x4`: splits x streams, powers of two.

    Raises:
        ExperimentError: another form.
    """
    found = []
    for part in text.split(","):
        splits, _, streams = part.strip().partition("x")
        if not (splits.isdigit() and streams.isdigit()) or any(
            int(n) < 1 or int(n) & (int(n) - 1) for n in (splits, streams)
        ):
            raise ExperimentError(f"order {part!r}", "SPLITSxSTREAMS, powers of two, e.g. 32x4", "correct --orders")
        found.append((int(splits), int(streams)))
    return found


def _regimes(op: str, arch: str, given: argparse.Namespace) -> list[Regime]:
    if op == "gemm":
        if given.shapes is None:
            raise ExperimentError("no --shapes", "a shape log", "make one: eagle3lab sweep shapes --out FILE")
        return gemm_regimes(arch, load_shapes(given.shapes), given.top)
    return attention_regimes(arch, _grid(given))


def _grid(given: argparse.Namespace) -> AttentionGrid:
    if given.build is None and given.device != "cuda" and not torch.cuda.is_available():
        return TINY
    points = tuple((point.batch, point.context) for point in scenarios.read_points(given.at))
    dims = [int(dim) for dim in given.dims.split(",") if dim.strip().isdigit()]
    if not dims or any(dim not in HEADS for dim in dims):
        raise ExperimentError(f"head sizes {given.dims!r}", f"of {list(HEADS)}", "correct --dims")
    return AttentionGrid({dim: HEADS[dim] for dim in dims}, points, tuple(int(n) for n in given.tokens.split(",")))


def _of_dim(regimes: Sequence[Regime], dim: int) -> list[Regime]:
    return [one for one in regimes if one.cases[0]["dim"] == dim] or list(regimes)


def _shapes(given: argparse.Namespace) -> int:
    """Products of the engines of a scenario, from their programs: no GPU, no weights."""
    if given.out is None:
        raise ExperimentError("shapes without --out", "a file for them", "add --out FILE")
    subject = shapes_of(find_geometry(given.geometry), given.arch)
    given.out.unlink(missing_ok=True)
    for point in scenarios.read_points(given.at):
        for k in scenarios.read_depths(given.spec):
            runner = subject.runner(Setting(k, point.batch, point.context + given.micro_tokens + HEADROOM))
            write_shapes(given.out, runner.gemms.counts)
    found = load_shapes(given.out)
    tags = sorted({product.tag for product in found})
    print(json.dumps({"command": "sweep shapes", "n_shapes": len(found), "tags": tags}))
    return EXIT_PASSED


def _build(op: str, given: argparse.Namespace) -> int:
    regimes = _regimes(op, given.arch, given)
    wanted = {
        variant.name: variant
        for regime in regimes for case in regime.cases for setting in regime.settings
        for variant in variants_of(op, given.arch, case, setting)
    }  # fmt: skip
    if op == "attention":
        for regime in regimes if given.tile_stats else ():
            counting = {**regime.cases[0], "counting": True}
            wanted |= {one.name: one for one in variants_of(op, given.arch, counting, regime.default)}
        for regime in _of_dim(regimes, given.orders_dim) if given.orders else ():
            for order in read_orders(given.orders):
                case = {**regime.cases[0], "order": order}
                wanted |= {one.name: one for one in variants_of(op, given.arch, case, {})}
    which, of = (int(part) for part in given.share.split("/"))
    made = cubins.build_cubins(list(wanted.values())[which - 1 :: of], given.arch, given.build, tell=print)
    print(json.dumps({"command": f"sweep {given.what}", "wanted": len(wanted), "built": made}))
    return EXIT_PASSED


def _scenario(given: argparse.Namespace, machine: Machine) -> Scenario:
    on_gpu = machine.device.type == "cuda"
    return Scenario(
        geometry=given.geometry if on_gpu else "nano", pair="planted",
        points=scenarios.read_points(given.at if on_gpu else "32x1"), ks=(0, given.depth),
        share=share_for_length(given.acceptance_length, given.depth), tokens=given.micro_tokens,
        rounds=given.rounds, warmup=0, dtype="bfloat16" if on_gpu else "float32", device=machine.device.type, peers=(),
    )  # fmt: skip


def _conclude(op: str, given: argparse.Namespace, rows: Path, *, is_whole: bool) -> int:
    """What was chosen, in words and as one JSON line; the tuned file if one is asked for."""
    sweep = read_sweep(rows)
    choices, missing = choose_all(sweep.rows, op)
    if not choices and not missing:
        raise ExperimentError(f"{sweep.name} has no rows of {op}", "rows of its sweep", f"eagle3lab sweep {given.what}")
    unequal = [row["regime"] for row in sweep.of(op, SCREEN) if not row["bits_equal"]]
    unlike = [row["regime"] for row in sweep.of(op, AGAINST) if not row["passes"]]
    for choice in choices:
        kept = "keeps the default" if choice.is_default else "changes"
        print(f"{choice.regime}: {kept}, {choice.reason}; {choice.baked_us:.2f} us")
    wrong = complaints(choices, missing)
    print("\n".join(wrong))
    if given.bake is not None:
        content = bake(given.bake, choices, sweep, rows, given.arch)
        tuned.read_artifact(given.bake)
        print(f"{given.bake.name}: {len(content.get(op, []))} entries of {op}")
    changed = sum(not choice.is_default for choice in choices)
    print(json.dumps({
        "command": f"sweep {given.what}", "regimes": len(choices), "changed": changed, "unequal_bits": len(unequal),
        "unlike_reference": len(unlike), "undecided": len(wrong), "is_whole": is_whole,
    }))  # fmt: skip
    if unequal or unlike:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if is_whole and not wrong else EXIT_UNDECIDED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3lab sweep", description="Time order-neutral settings of the kernels and keep the best."
    )
    parser.add_argument("what", choices=("shapes", *OPS), help="shapes: log the engine's products; else what to sweep")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows are added to this file; shapes: the log")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="judge these rows instead of measuring")
    parser.add_argument("--bake", type=Path, metavar="FILE", help="write entries to this tuned file")
    parser.add_argument("--build", type=Path, metavar="DIR", help="compile the kernels needed into DIR instead")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="of --build: every N-th kernel from the I-th")
    parser.add_argument("--arch", choices=ARCHES, default="sm_90a", help="of --build, --bake, shapes (default sm_90a)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu: the emulator")
    parser.add_argument("--limit-s", type=float, default=480.0, help="begin no regime after this many seconds (480)")
    _op_options(parser)
    _engine_options(parser)
    return parser


def _op_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="gemm: shape log")
    parser.add_argument("--top", type=int, default=12, metavar="N", help="gemm: regimes with every setting (12)")
    parser.add_argument("--dims", default="128,64", help="fmha: head sizes (128,64)")
    parser.add_argument("--tokens", default="1,4,8,16,64", help="fmha: queries a sequence (1,4,8,16,64)")
    parser.add_argument(
        "--orders", default="", metavar="SPLITSxSTREAMS,...", help="fmha: orders of sums to try jointly"
    )
    parser.add_argument("--orders-dim", type=int, default=128, help="fmha: head size of --orders (128)")
    parser.add_argument("--tile-stats", action="store_true", help="fmha: count tiles too, with kernels of their own")

    parser.add_argument("--ab", action="store_true", help="fmha: hold the default against plain attention first")


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--confirm", action="store_true", help="micro runs of the best five and the default, as rows")
    parser.add_argument("--geometry", choices=tuple(GEOMETRIES), default="llama-3.1-8b", help="shapes and --confirm")
    parser.add_argument("--at", default="32768x1,16384x4", metavar="CONTEXTxBATCH,...", help="(32768x1,16384x4)")
    parser.add_argument("--spec", default="0,3", metavar="K,...", help="shapes: depths (0,3)")
    parser.add_argument("--depth", type=int, default=3, help="--confirm: drafts a step (3)")
    parser.add_argument("--acceptance-length", type=float, default=3.0, help="--confirm: dial of the pair (3.0)")
    parser.add_argument("--micro-tokens", type=int, default=256, help="--confirm: tokens a request and round (256)")
    parser.add_argument("--rounds", type=int, default=2, help="--confirm: rounds (2)")
