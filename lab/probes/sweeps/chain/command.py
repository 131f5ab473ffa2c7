"""Times products in a chain of layers: python3 -m lab.probes.sweeps.chain.command --out chain.jsonl

A cell is a geometry and so many rows of a pass: the products of its first layers as the engine launches them, with what
packs rows for them, against `F.linear` for the same products in the same order, in two graphs that take turns. Both
read weights of their own, more than the L2 cache holds.

`--build DIR` compiles ahead on any machine; the run finds it through the environment variable EAGLE3_CUBINS.
Source: docs/requirements.md R-104, R-106; timing rules derived here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from eagle3core.kernels import cubins, launch
from eagle3core.step import variants_of
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.kernels import ChainOptions
from lab.options.reader import run_program
from lab.options.values import cut_name
from lab.pairs.planted import find_geometry
from lab.probes.proofs.plans import shapes_of
from lab.probes.proofs.subject import Subject, open_subject
from lab.probes.sweeps.chain.passes import by_torch, launches_in, layers_of, products_in, read_once, setting_of
from lab.rows import environment, gpus
from lab.rows.graph_clock import time_graphs
from lab.rows.maker import RowMaker
from lab.rows.store import Row, RowWriter, block, read_rows, utc_now

CELL = "product_chain"
MOST_MEAN, MOST_CELL = 1.00, 1.10  # of torch's time: all cells of so many rows, and each


def main(options: ChainOptions) -> int:
    """Measures, unless rows are given, and judges; 1 if a mean or a cell is too slow, 3 if cells are missing."""
    names = [cut_name(name, options.layers) for name in options.geometry]
    if options.build is not None:
        return _build(options, names)
    if options.rows is None:
        deadline = time.monotonic() + options.limit_s
        with RowWriter(options.out) as out:
            run = _Run(out)
            for name in names:
                run.measure(name, options.at, deadline)
    return _judge(read_rows(options.rows or options.out), names, options.at)


def _build(options: ChainOptions, names: Sequence[str]) -> int:
    """Compile what fills the engines and what the chains launch."""
    assert options.build is not None, "a folder to compile into"
    runners = [
        shapes_of(find_geometry(name), options.arch).runner(setting_of(rows)) for name in names for rows in options.at
    ]
    wanted = {(v.name, repr(v.constants)): v for runner in runners for v in variants_of(runner.all_programs)}
    which, n = options.share
    made = cubins.build_cubins(list(wanted.values())[which - 1 :: n], options.arch, options.build, tell=print)
    print(f"{len(wanted)} kernels wanted, {made} compiled")
    return EXIT_PASSED


class _Run:
    """One run: its machine, its rows."""

    def __init__(self, out: RowWriter) -> None:
        launch.device_arch()  # there is a GPU, or the reason why there is none
        machine = environment.collect()
        self.out = out
        self.maker = RowMaker(
            f"chain-{utc_now()}", "chain", machine.fingerprint, shared={"gpu": torch.cuda.get_device_name()}
        )
        out.write(self.maker.machine(machine))

    def measure(self, name: str, at: Sequence[int], deadline: float) -> None:
        """All cells of a geometry, until the time is over."""
        if time.monotonic() > deadline:
            return
        subject = open_subject(name)
        for rows in at:
            if time.monotonic() > deadline:
                return
            self._cell(subject, name, rows)
            torch.cuda.empty_cache()

    def _cell(self, subject: Subject, name: str, rows: int) -> None:
        runner = read_once(subject, rows)
        layers = layers_of(runner, rows)
        launches, products = launches_in(layers), products_in(layers)
        ours, theirs = time_graphs([[launch.bind(launches)], [by_torch(products, subject.target.device)]])
        n_packs = len(launches) - len(products)
        ratio = ours.median_us / theirs.median_us
        values = {
            **ours.values(), "torch_us": theirs.median_us, "over_torch": ratio, "n_products": len(products),
            "n_packs": n_packs, **block("clocks", gpus.clocks()),
        }  # fmt: skip
        row = self.maker.measured(
            CELL, f"{name} x {rows}", values, {"geometry": name, "rows": rows},
            timer=ours.timer, warmup=ours.warmup, repeats=ours.repeats,
        )  # fmt: skip
        self.out.write(row)
        print(
            f"{name}, {rows} rows: {ours.median_us:.1f} us, F.linear {theirs.median_us:.1f}, {ratio:.3f} of it; "
            f"{len(products)} products, {n_packs} launches that pack",
            flush=True,
        )


def _judge(rows: Sequence[Row], names: Sequence[str], at: Sequence[int]) -> int:
    """Says what the newest cells mean; the exit code."""
    cells: dict[tuple[str, int], float] = {}
    for row in rows:
        over = row.number("over_torch")
        if row.kind == CELL and over is not None:
            cells[str(row.parameters["geometry"]), int(str(row.parameters["rows"]))] = over
    missing = [f"{name} x {n}" for name in names for n in at if (name, n) not in cells]
    is_slow = False
    for n in at:
        found = {name: cells[name, n] for name in names if (name, n) in cells}
        if not found:
            continue
        mean, worst = statistics.geometric_mean(found.values()), max(found, key=lambda name: found[name])
        slow = mean > MOST_MEAN or found[worst] > MOST_CELL
        is_slow = is_slow or slow
        print(
            f"{'FAILED' if slow else 'held'}  {n} rows: {mean:.3f} of F.linear's time in a chain (at most "
            f"{MOST_MEAN:.2f}), worst {found[worst]:.3f}, {worst} (at most {MOST_CELL:.2f})"
        )
    if missing:
        print(f"missing: {', '.join(missing)}")
    if is_slow:
        return EXIT_GATE_FAILED
    return EXIT_COULD_NOT_RUN if missing else EXIT_PASSED


if __name__ == "__main__":
    run_program(ChainOptions, main)
