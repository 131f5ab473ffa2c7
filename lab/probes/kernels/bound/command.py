"""Times attention over trees beside its bounds: python3 -m lab.probes.kernels.bound.command --out attention_bound.jsonl

One sequence of 8B's shapes. A row holds our attention under a tree's mask, as the engine runs it; torch's backends with
no mask, whole and in pieces; two plain products of the same shapes; and what memory and tensor cores allow. Rows of
measured passes over trees (`eagle3lab prove trees`) are then read with these times in place of ours: see `ratio`.

`--build DIR` compiles ahead on any machine; the run finds it through the environment variable EAGLE3_CUBINS.
Source: docs/requirements.md R-53, R-104; timing rules derived here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels import Case, Tensors, Variant, case_id, cubins, launch, proof
from eagle3core.kernels.attention import CARD
from lab.errors import EXIT_GATE_FAILED, EXIT_PASSED
from lab.options.kernels import AttentionBoundOptions
from lab.options.reader import run_program
from lab.probes.kernels import bench
from lab.probes.kernels.attention_bench import noted
from lab.probes.kernels.attention_peers import contiguous, flash_tail_merge
from lab.probes.kernels.bound import ratio
from lab.probes.kernels.bound.ways import Way, attended, pieced_ways, products, whole_ways
from lab.probes.kernels.rows import plain_shape
from lab.rows.clock import Timing
from lab.rows.committed import newest_committed
from lab.rows.graph_clock import TIMER, Captured, capture, time_captured, time_graph
from lab.rows.store import RowWriter, block, read_rows

KEYS = (512, 32768)
NODES = (1, 8, 16, 32, 64)  # the first is a plain step
MASKED = "flash_tail_merge"  # the one peer of `attention_bench` under a mask that torch need not compile
_SQUARE = 8192  # of the products that say what tensor cores give: large enough to fill them, small enough to repeat


def shape(n_keys: int, n_nodes: int) -> Case:
    """Attention of 8B's target over one sequence, of `n_nodes` rows of a tree, which are among the keys."""
    kind: Case = {"dtype": "bf16", "dim": 128, "heads": 32, "kv_heads": 8, "batch": 1, "kv": n_keys, "tokens": n_nodes}
    return {**kind, "paths": True} if n_nodes > 1 else kind


def main(options: AttentionBoundOptions) -> int:
    """Measures, unless rows are given, and says what the rows mean; 1 if our attention is wrong."""
    if options.build is not None:
        which, n = options.share
        made = cubins.build_cubins(needed(options.arch)[which::n], options.arch, options.build, tell=print)
        print(f"{made} compiled")
        return EXIT_PASSED
    if options.rows is None:
        with RowWriter(options.out) as out:
            run = BoundRun(out, launch.device_arch(), time.monotonic() + options.limit_s, only="")
            run.measure_ceiling()
            run.measure_products()
            if not run.measure_all():
                return EXIT_GATE_FAILED
    bounds = ratio.read_bounds(read_rows(options.rows or options.out))
    passes = options.proofs or newest_committed("proofs.jsonl")
    print("\n".join(ratio.lines(bounds, ratio.read_passes(read_rows(passes)) if passes else [])))
    return EXIT_PASSED


def needed(arch: str) -> list[Variant]:
    """Every kernel that a run launches."""
    assert CARD.variants_of is not None, "the card says which variants a case needs"
    cases = [shape(n_keys, n_nodes) for n_keys in KEYS for n_nodes in NODES]
    wanted = [*bench.ceiling_variants(arch), *(v for case in cases for v in CARD.variants_of(arch, case))]
    return list({v.name: v for v in wanted}.values())


class BoundRun(bench.Run):
    """A run that times one sequence's attention beside calls that obey no mask."""

    tflops: float

    def measure_products(self) -> None:
        """What tensor cores give: one large product of bf16, in torch."""
        a, b = (torch.randn(_SQUARE, _SQUARE, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        us = time_graph([lambda: torch.matmul(a, b)]).median_us
        self.tflops = 2 * _SQUARE**3 / us / 1e6
        self.write("compute_ceiling", "torch.matmul", {"tflops": self.tflops}, {"size": _SQUARE}, timer=TIMER)
        print(f"one product of {_SQUARE} cubed: {self.tflops:.0f} TFLOP/s", flush=True)

    def measure_all(self) -> bool:
        """Proves (numbers, not bits) and times every shape; False if ours is wrong for one."""
        for n_keys in KEYS:
            for n_nodes in NODES:
                case = shape(n_keys, n_nodes)
                if self.is_over():
                    self.out.write(self.maker.missing(ratio.BOUND, CARD.name, "the time was up", _shape_of(case)))
                    continue
                inputs = CARD.example(case, proof.generator(0, self.device), self.device)
                outputs = proof.run(CARD, self.arch, case, inputs, _execute)
                [error] = proof.deviations(CARD, case, inputs, outputs)
                if not error.passes:
                    self.write(
                        ratio.BOUND, CARD.name, {"error": error.error, "allowed": error.allowed}, _shape_of(case)
                    )
                    print(f"{case_id(case)}: error {error.error:.3g}, allowed {error.allowed:.3g}", flush=True)
                    return False
                self._measure_shape(case)
                torch.cuda.empty_cache()
        return True

    def _measure_shape(self, case: Case) -> None:
        rotation = self._rotation(CARD, case)
        inputs = [each for each, _ in rotation]
        graphs: dict[str, Captured] = {"ours": capture([bound for _, bound in rotation])}
        missing: dict[str, str] = {}
        for name, calls in self._calls(case, inputs, missing).items():
            with noted(missing, name):
                graphs[name] = capture(calls)
        times = dict(zip(graphs, time_captured(list(graphs.values())), strict=True))
        self._row(case, times, missing)

    def _calls(self, case: Case, inputs: list[Tensors], missing: dict[str, str]) -> dict[str, list[Callable[[], Any]]]:
        """By name, a call for each of `inputs`; why others are missing. All ran once, and their numbers are right."""
        found: dict[str, list[Callable[[], Any]]] = {}
        gathered = [(each["q"], *contiguous(case, each)[:2]) for each in inputs]
        for way in [*whole_ways(), *pieced_ways(case["kv"])]:
            with noted(missing, way.name):
                first = _checked(way, *gathered[0])
                found[way.name] = [first, *(way.call(*way.operands(*each)) for each in gathered[1:])]
        with noted(missing, MASKED):
            merging = [flash_tail_merge(case, each) for each in inputs]
            merging[0]()
            found[MASKED] = list(merging)
        made = [products(*each) for each in gathered]
        return found | {name: [one[name] for one in made] for name in ("scores", "output")}

    def _row(self, case: Case, times: Mapping[str, Timing], missing: Mapping[str, str]) -> None:
        ours, cost = times["ours"], CARD.cost(case)
        us = {name: timing.median_us for name, timing in times.items()}
        whole = {way.name: us[way.name] for way in whole_ways() if way.name in us}
        pieces = {way.name: us[way.name] for way in pieced_ways(case["kv"]) if way.name in us}
        flops = cost.flops / 2  # of one product
        values = {
            **ours.values(), "n_bytes": cost.bytes, "n_flops": cost.flops,
            "floor_us": cost.floor_us(self.gb_per_s), "compute_floor_us": cost.flops / self.tflops / 1e6,
            **block("unmasked_us", whole), **block("unmerged_us", pieces), **block("missing_libraries", missing),
            **block("masked_us", {name: us[name] for name in (MASKED,) if name in us}),
            **block("matmul_us", {name: us[name] for name in ("scores", "output")}),
            **block("matmul_tflops", {name: flops / us[name] / 1e6 for name in ("scores", "output")}),
        }  # fmt: skip
        how = {"timer": ours.timer, "warmup": ours.warmup, "repeats": ours.repeats}
        self.write(ratio.BOUND, CARD.name, values, _shape_of(case), **how)
        print(f"{case_id(case)}: ours {ours.median_us:.2f} us; {whole} unmerged {pieces} missing {dict(missing)}")


def _shape_of(case: Case) -> dict[str, Any]:
    return block("shape", plain_shape(case))


def _execute(launches: Any) -> None:
    launch.execute(launches)
    torch.cuda.synchronize()


def _checked(way: Way, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """The call, which ran once under the 2x rule.

    Raises:
        BackendUnavailable: its numbers are wrong.
    """
    operands = way.operands(q, k, v)
    call = way.call(*operands)
    truth = attended(*(each.float() for each in operands))
    found = proof.deviation(way.name, call(), attended(*operands), truth)
    if not found.passes:
        raise BackendUnavailable(
            f"{way.name} errs by {found.error:.3g}", f"at most {found.allowed:.3g}", "take another backend"
        )
    return call


if __name__ == "__main__":
    run_program(AttentionBoundOptions, main)
