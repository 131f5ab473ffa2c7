"""Times the cards on a GPU: python3 -m lab.probes.kernels.bench --out rows.jsonl --ops gemm

Proofs come first: every emulated case of an op runs on the GPU under the 2x rule and the bit rule; an op that fails is
not timed. Then each shape worth measuring is captured, library peers beside it, in CUDA graphs whose launches rotate
over more memory than the L2 cache holds. One row a measurement, on disk at once: the run may be stopped at any time.

`--build DIR --arch sm_90a` compiles everything that a run needs, on any machine, and stops; the run finds it through
the environment variable EAGLE3_CUBINS. `--settings` times a card's settings against each other (`settings`); those of
matrix products and attention, from which a tuned file is made, are `eagle3lab sweep`'s.

Source: docs/requirements.md R-104, R-105, R-129; timing rules derived here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from eagle3core.kernels import Card, Case, Tensors, Variant, case_id, cubins, launch, proof
from lab.errors import EXIT_COULD_NOT_RUN, EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.kernels import BenchOptions
from lab.options.reader import run_program
from lab.probes.ceilings import known_gb_per_s
from lab.probes.kernels.cards import named
from lab.probes.kernels.peers import peers_of
from lab.probes.kernels.reading.bulk import bulk_variants
from lab.probes.kernels.reading.ceiling import run_ceiling
from lab.probes.kernels.reading.lanes import read_variants as read_variants
from lab.probes.kernels.roofline import allowed_us
from lab.probes.kernels.rows import CEILING, KERNEL, PROOF, READ, plain_shape
from lab.probes.kernels.settings import compared, time_settings
from lab.rows import environment, gpus
from lab.rows.clock import Timing
from lab.rows.graph_clock import TIMER, time_graphs
from lab.rows.graph_clock import time_graph as time_graph
from lab.rows.maker import RowMaker
from lab.rows.store import RowWriter, block, utc_now

ROTATED_BYTES = 1_200_000_000  # a rotation's operands; 20 times an H200's L2 cache
PROVEN, FAILED, INCOMPLETE = "passed", "failed", "incomplete"  # verdicts of a card's proofs
_MOST_COPIES = 64  # of an op of a few kilobytes, whose time is latency and not memory


def main(options: BenchOptions) -> int:
    """Proves and times; 0, 1 if a proof failed, or 3 if the time was up before all cases were proven."""
    # Attention has a benchmark of its own.
    cards = named(options.ops) if options.ops else [card for card in named(()) if card.name != "attention"]
    if options.build is not None:
        return _build(cards, options)
    with RowWriter(options.out) as out:
        run = Run(out, launch.device_arch(), time.monotonic() + options.limit_s, options.only)
        if options.settings:
            equal = [time_settings(run, card) for card in cards]
            return EXIT_PASSED if all(equal) else EXIT_GATE_FAILED
        torch.backends.cuda.matmul.allow_tf32 = False
        run.measure_ceiling()
        verdicts = {card.name: run.prove(card) for card in cards}
        for card in cards:
            if verdicts[card.name] == PROVEN:
                run.measure(card)
    return exit_code(verdicts.values())


def exit_code(verdicts: Collection[str]) -> int:
    """Of a run with these verdicts of its proofs."""
    if FAILED in verdicts:
        return EXIT_GATE_FAILED
    return EXIT_PASSED if set(verdicts) <= {PROVEN} else EXIT_COULD_NOT_RUN


def _build(cards: Sequence[Card], options: BenchOptions) -> int:
    """Compiles what the run of these options needs, or every n-th of it (`share` = which, n)."""
    assert options.build is not None, "a folder to compile into"
    arch = options.arch
    wanted: dict[str, Variant] = {} if options.settings else {v.name: v for v in ceiling_variants(arch)}
    for card in cards:
        if card.variants_of is None:
            wanted |= {v.name: v for v in [*card.variants(arch), *card.slow_variants(arch)]}
            continue
        uses = compared(card, arch, shapes_of(card, options.only)) if options.settings else _uses(card, arch)
        for case, setting in uses:
            wanted |= {v.name: v for v in card.variants_of(arch, case, **setting)}
    which, n = options.share
    made = cubins.build_cubins(list(wanted.values())[which::n], arch, options.build, tell=print)
    print(f"{len(wanted)} kernels wanted, {made} compiled")
    return 0


def ceiling_variants(arch: str) -> list[Variant]:
    """Every kernel that a run's ceiling is measured with."""
    return [*read_variants(), *bulk_variants(arch)]


def _uses(card: Card, arch: str) -> list[tuple[Case, Mapping[str, Any]]]:
    """Every (case, setting) that a run on `arch` launches."""
    uses = []
    for case in proven(card):
        uses += [(case, setting) for setting in card.settings]
        uses.append(({**case, "m": 1} if "m" in case else case, {}))  # rows alone
    return uses + [(case, {}) for case in card.shapes]


def proven(card: Card) -> list[Case]:
    """The cases a run proves before it times: the emulator's, and every seventh of the measured shapes."""
    return [*card.cases, *card.slow_cases, *card.shapes[3::7]]


class Run:
    """One benchmark run: its clock, its ceiling, its rows."""

    def __init__(self, out: RowWriter, arch: str, deadline: float, only: str) -> None:
        self.out, self.arch, self.deadline, self.only = out, arch, deadline, only
        self.device = torch.device("cuda")
        gpu = torch.cuda.get_device_name()
        self.known_gb_per_s = known_gb_per_s(gpu)
        self.gb_per_s = self.known_gb_per_s or math.nan  # of another kind of GPU none before it is measured
        machine = environment.collect()
        self.maker = RowMaker(f"kernels-{utc_now()}", "kernels", machine.fingerprint, shared={"gpu": gpu})
        out.write(self.maker.machine(machine))

    def write(self, kind: str, name: str, values: dict[str, Any], parameters: dict[str, Any], **how: Any) -> None:
        """One more row, with the clocks of this moment."""
        values = {**values, **block("clocks", gpus.clocks())}
        self.out.write(self.maker.measured(kind, name, values, parameters, **how))

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def measure_ceiling(self) -> None:
        """The read ceiling: the best of plain read-only kernels in this run, or a known one if that is higher."""
        n_bytes = 2 << 30
        data = torch.zeros(n_bytes // 4, dtype=torch.int32, device=self.device)
        sink = torch.zeros(1, dtype=torch.int32, device=self.device)
        best = 0.0
        for variant in read_variants():
            for blocks in (132 * 2, 132 * 4, 132 * 8):
                bound = launch.bind([variant.launch((blocks,), x=data, y=sink, n_bytes=n_bytes)])
                best = max(best, n_bytes / time_graph([bound] * 4).median_us / 1e3)
        del data
        by_bulk = run_ceiling(self.device)
        self.write(CEILING, READ, {"gb_per_s": best, **by_bulk.values()}, {}, timer=TIMER)
        self.gb_per_s = max(self.known_gb_per_s or 0.0, best)
        known = "" if self.known_gb_per_s else "; none is known of this GPU"
        print(f"read ceiling of this run {best:.0f} GB/s; floors use {self.gb_per_s:.0f}{known}", flush=True)
        print(f"  by {by_bulk.reader} {by_bulk.gb_per_s:.0f} GB/s", flush=True)

    def prove(self, card: Card) -> str:
        """The verdict: does every case of the card obey the 2x rule and the bit rule on this device?"""
        found, proven_cases, cases = [], 0, proven(card)
        for seed, case in enumerate(cases):
            if self.is_over():
                break
            found += prove_case(card, self.arch, case, self.device, seed)
            proven_cases += 1
        verdict = FAILED if found else PROVEN if proven_cases == len(cases) else INCOMPLETE
        values = {"verdict": verdict, "n_cases": proven_cases, "n_cases_wanted": len(cases), "faults": found}
        self.write(PROOF, card.name, values, {})
        print(f"{card.name}: {proven_cases} of {len(cases)} proofs, {len(found)} faults {found[:5]}", flush=True)
        return verdict

    def measure(self, card: Card) -> None:
        """Times every shape and its peers, in the same kind of graph over the same rotation."""
        ratios: dict[Any, list[tuple[float, float]]] = {}
        libraries = peers_of(card.name)
        for case in self.shapes(card):
            rotation = self._rotation(card, case)
            calls = [[peer(case, inputs) for inputs, _ in rotation] for peer in libraries.values()]
            ours, *theirs = time_graphs([[bound for _, bound in rotation], *calls])
            peers = {name: timing.median_us for name, timing in zip(libraries, theirs, strict=True)}
            self._report(card, case, ours, peers)
            if peers:
                share = card.cost(case).floor_us(self.gb_per_s) / ours.median_us
                ratios.setdefault(case.get("m"), []).append((ours.median_us / min(peers.values()), share))
        for rows, cells in ratios.items():
            ratio, share = (statistics.geometric_mean(column) for column in zip(*cells, strict=True))
            worst = max(cell[0] for cell in cells)
            print(
                f"{card.name} m={rows}: ratio {ratio:.3f} (worst {worst:.3f}), {100 * share:.1f}% of floor", flush=True
            )

    def shapes(self, card: Card) -> Iterator[Case]:
        """Those that were asked for, until the time is over."""
        return (case for case in shapes_of(card, self.only) if not self.is_over())

    def rotated(self, card: Card, case: Case) -> list[Tensors]:
        """Inputs of as many copies of a case as no cache holds together."""
        copies = min(_MOST_COPIES, max(2, -(-ROTATED_BYTES // card.cost(case).bytes)))
        return [card.example(case, proof.generator(copy, self.device), self.device) for copy in range(copies)]

    def _rotation(self, card: Card, case: Case) -> list[tuple[Tensors, Callable[[], None]]]:
        return [(inputs, self._bound(card, case, inputs)) for inputs in self.rotated(card, case)]

    def _bound(self, card: Card, case: Case, inputs: Any) -> Callable[[], None]:
        outputs = card.outputs(case, inputs)
        return launch.bind(card.launches(self.arch, case, inputs, outputs))

    def write_kernel(
        self, card: Card, case: Case, ours: Timing, peers: dict[str, float], **more: Any
    ) -> tuple[float, str | None]:
        """The row of one timed shape; its floor, and the fastest peer."""
        cost, floor = card.cost(case), card.cost(case).floor_us(self.gb_per_s)
        peer = min(peers, key=lambda name: peers[name]) if peers else None
        values = {
            **ours.values(), "floor_us": floor, "n_bytes": cost.bytes, "n_flops": cost.flops,
            "dependent_passes": cost.dependent_passes, "library": peer, "library_us": peers[peer] if peer else None,
            "is_complete": bool(peer) or not peers_of(card.name), **block("libraries_us", peers), **more,
        }  # fmt: skip
        how = {"timer": ours.timer, "warmup": ours.warmup, "repeats": ours.repeats}
        self.write(KERNEL, card.name, values, block("shape", plain_shape(case)), **how)
        return floor, peer

    def _report(self, card: Card, case: Case, ours: Timing, peers: dict[str, float]) -> None:
        floor, peer = self.write_kernel(card, case, ours, peers)
        beside = f"{peer} {peers[peer]:8.2f} ratio {ours.median_us / peers[peer]:.3f}" if peer else "no peer"
        share = 100 * floor / ours.median_us
        cost = card.cost(case)
        bound = allowed_us(cost.bytes, cost.dependent_passes, self.known_gb_per_s or self.gb_per_s)
        print(
            f"{card.name} {case_id(case)}: {ours.median_us:8.2f} us, {share:5.1f}% of floor, "
            f"{ours.median_us / bound:.2f} of the bound {bound:.2f}, {beside}",
            flush=True,
        )


def shapes_of(card: Card, only: str) -> list[Case]:
    """The card's shapes that have every word of `only`, each `name=value` or `name=value,value`."""

    def has(words: Collection[str], wanted: str) -> bool:
        name, _, values = wanted.rpartition("=")
        return any((f"{name}={value}" if name else value) in words for value in values.split(","))

    return [case for case in card.shapes if all(has(case_id(case).split(), word) for word in only.split())]


def prove_case(card: Card, arch: str, case: Case, device: torch.device, seed: int) -> list[str]:
    """What is wrong with the numbers, the bits or the promises of one case on the GPU, in words."""

    def execute(launches: Any) -> None:
        launch.execute(launches)
        torch.cuda.synchronize()

    inputs = card.example(case, proof.generator(seed, device), device)
    outputs = proof.run(card, arch, case, inputs, execute)
    found = [
        f"{d.output}: error {d.error:.3g}, allowed {d.allowed:.3g}"
        for d in proof.deviations(card, case, inputs, outputs)
        if not d.passes
    ]
    found += card.invariants(case, inputs, outputs)
    rows = range(card.n_rows(case)) if card.n_rows(case) <= 8 else (0, 1, card.n_rows(case) - 1)
    found += proof.batch_dependence(card, arch, case, inputs, execute, list(rows))
    return [f"{case_id(case)}: {fault}" for fault in found]


if __name__ == "__main__":
    run_program(BenchOptions, main)
