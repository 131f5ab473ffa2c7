"""Times attention beside the libraries: python3 -m lab.probes.kernels.attention_bench --out rows.jsonl

The frame, the proofs and the timing are those of `bench`; here a peer may be missing for a case, which a row says with
the reason, and every row carries what was predicted before the first run. `--build DIR --arch sm_90a` compiles all
kernels of a run on any machine.

Source: docs/requirements.md R-104, R-105; timing rules derived here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

from eagle3core.errors import BackendUnavailable
from eagle3core.kernels import Card, Case, Variant, case_id, cubins, launch, proof
from eagle3core.kernels.attention import CARD
from lab.options.kernels import AttentionBenchOptions
from lab.options.reader import run_program
from lab.probes.kernels import bench
from lab.probes.kernels.attention_peers import FLASHINFER_US, FLEX_TOKENS
from lab.probes.kernels.peers import peers_of
from lab.rows.clock import Timing
from lab.rows.graph_clock import Captured, capture, time_captured
from lab.rows.store import RowWriter, block

# What the design should give on an H200, us, for 1, 4, 8, 16, 32 and 64 tokens, by (head size, batch); derived from
# the byte floor, the prototype's fixed costs and 300 TFLOP/s of mma.sync, and written down before measuring.
TOKENS = (1, 4, 8, 16, 32, 64)
PREDICTED_US = {
    (128, 1): (35.0, 36.8, 40.5, 45.0, 62.0, 115.0),
    (128, 4): (65.5, 68.5, 74.0, 82.0, 115.0, 220.0),
    (64, 1): (18.5, 23.0, 30.0, 38.0, 62.0, 115.0),
    (64, 4): (33.5, 38.0, 50.0, 70.0, 115.0, 215.0),
}
# For a pass of 10 nodes over one sequence, by (head size, keys), however many of these are of earlier levels: between 8
# and 16 tokens above; over 512 keys two launches with next to nothing to read.
PREDICTED_LEVEL_US = {(128, 512): 8.0, (128, 32768): 43.0, (64, 512): 8.0, (64, 32768): 34.0}
# For a tree of 60 nodes, by keys: between 32 and 64 tokens above, with two blocks of rows in place of one.
PREDICTED_TREE_US = {512: 22.0, 32768: 135.0}
# Under a window of 128 of 32768 keys, by tokens: a session of as many keys, and beside the tree's nodes, two of which
# share a tile of head size 64, streams that are passed by.
PREDICTED_WINDOW_US = {1: 6.0, 4: 7.0, 64: 14.0, 60: 20.0}
# Least share of the floor, per cent, that head size 128 must reach.
LEAST_SHARE = {(1, 1): 80, (1, 4): 77, (1, 8): 71, (4, 1): 85, (4, 4): 81, (4, 8): 76}

LEFT_OUT = "left out of this run"


def predicted_us(case: Case) -> float:
    """What was expected of a measured shape, us."""
    if "window" in case:
        return PREDICTED_WINDOW_US[case["tokens"]]
    if "paths" in case:
        return PREDICTED_TREE_US[case["kv"]]
    if "earlier" in case:
        return PREDICTED_LEVEL_US[case["dim"], case["kv"]]
    return PREDICTED_US[case["dim"], case["batch"]][TOKENS.index(case["tokens"])]


def main(options: AttentionBenchOptions) -> int:
    """Proves and times; 0, 1 if a proof failed, or 3 if the time was up before all cases were proven."""
    if options.build is not None:
        which, n = options.share
        wanted = needed(options.arch)[which::n]
        made = cubins.build_cubins(wanted, options.arch, options.build, tell=print)
        print(f"{len(wanted)} kernels wanted, {made} compiled")
        return 0
    with RowWriter(options.out) as out:
        run = AttentionRun(out, launch.device_arch(), time.monotonic() + options.limit_s, options.only)
        run.skipped = set(options.skip_peers)
        run.measure_ceiling()
        verdict = run.prove(CARD)
        if verdict != bench.PROVEN:
            return bench.exit_code([verdict])
        run.compile_peers(CARD)
        run.measure(CARD)
    return 0


def compile_flex(case: Case) -> None:
    """Compiles FlexAttention for a case, which then lies in torch's cache on disk for every process."""
    device = torch.device("cuda")
    inputs = CARD.example(case, proof.generator(0, device), device)
    peers_of(CARD.name)["flex"](case, inputs)()
    torch.cuda.synchronize()


def needed(arch: str) -> list[Variant]:
    """Every kernel that a run launches: proofs under every setting, rows alone, shapes, and the read ceiling."""
    uses: list[tuple[Case, Mapping[str, Any]]] = [(case, {}) for case in CARD.shapes]
    for case in bench.proven(CARD):
        uses += [(case, setting) for setting in CARD.settings]
        plain = {key: value for key, value in case.items() if key != "counting"}
        if plain.pop("paths", False):  # a row alone is plain decode
            uses.append(({**plain, "tokens": 1, "prefix": (0,)}, {}))
            continue
        uses += [({**plain, "tokens": n, "prefix": (0,)}, {}) for n in range(1, case["tokens"] + 1)]
        if "earlier" in plain:  # of a chain a row alone is plain decode
            uses.append(({**plain, "tokens": 1, "prefix": (0,), "earlier": 0}, {}))
    assert CARD.variants_of is not None, "the card says which variants a case needs"
    found = {v.name: v for case, setting in uses for v in CARD.variants_of(arch, case, **setting)}
    return [*bench.ceiling_variants(arch), *found.values()]


@contextmanager
def noted(missing: dict[str, str], name: str) -> Iterator[None]:
    """A library's refusal is recorded, with its words."""
    try:
        yield
    except (BackendUnavailable, RuntimeError) as error:
        missing[name] = str(error).strip().split("\n")[0][:200] or type(error).__name__


class AttentionRun(bench.Run):
    """A run whose peers may be missing for a case."""

    skipped: set[str]

    def compile_peers(self, card: Card) -> None:
        """Compiles FlexAttention for all shapes at once, a process each: one after the other takes minutes."""
        cases = [case for case in self.shapes(card) if case["tokens"] in FLEX_TOKENS and "flex" not in self.skipped]
        if not cases:
            return
        n, begun = min(len(cases), os.cpu_count() or 1), time.monotonic()
        with ProcessPoolExecutor(n, get_context("spawn")) as pool:
            made: list[Future[None]] = [pool.submit(compile_flex, case) for case in cases]
        reasons = {str(each.exception()).split("\n")[0] for each in made if each.exception()}  # the rows will say more
        print(f"FlexAttention for {len(cases)} shapes: {time.monotonic() - begun:.0f} s {sorted(reasons)}", flush=True)

    def measure(self, card: Card) -> None:
        """Times every shape and its peers in the same kind of graph over the same rotation."""
        for case in self.shapes(card):
            rotation = self._rotation(card, case)
            graphs, missing = self._peers(card, case, [inputs for inputs, _ in rotation])
            ours, *theirs = time_captured([capture([bound for _, bound in rotation]), *graphs.values()])
            times = {name: timing.median_us for name, timing in zip(graphs, theirs, strict=True)}
            self._row(card, case, ours, times, missing)
            del rotation, graphs
            torch.cuda.empty_cache()

    def _peers(self, card: Card, case: Case, inputs: list[Any]) -> tuple[dict[str, Captured], dict[str, str]]:
        """The peers' graphs, and why others are missing.

        All run once before any is captured: torch's compiler frees cuBLAS's workspaces, which a graph would still use.
        """
        calls, graphs, missing = {}, {}, {}
        for name, peer in peers_of(card.name).items():
            if name in self.skipped or self.is_over():
                missing[name] = LEFT_OUT
                continue
            with noted(missing, name):
                made = [peer(case, one) for one in inputs]
                for call in made:
                    call()
                calls[name] = made
        for name, made in calls.items():
            with noted(missing, name):
                graphs[name] = capture(made)
        return graphs, missing

    def _row(self, card: Card, case: Case, ours: Timing, times: dict[str, float], missing: dict[str, str]) -> None:
        batch, tokens, dim = case["batch"], case["tokens"], case["dim"]
        quoted = None if "window" in case else FLASHINFER_US.get((dim, batch, tokens))
        predicted = predicted_us(case)
        more = {**block("missing_libraries", missing), "predicted_us": predicted}
        # A library that does not exist for a case takes nothing from its row; one left out may be the fastest.
        more |= {"is_complete": bool(times) and LEFT_OUT not in missing.values()}
        more |= block("quoted_us", {"flashinfer, another run": quoted} if quoted else {})
        floor, _ = self.write_kernel(card, case, ours, times, **more)
        share, best = 100 * floor / ours.median_us, min([*times.values(), *([quoted] if quoted else [])], default=None)
        least = LEAST_SHARE.get((batch, tokens)) if dim == 128 else None
        print(
            f"{case_id(case)}: {ours.median_us:.2f} us (predicted {predicted:.1f}), {share:.1f}% of floor"
            f"{f' (at least {least})' if least else ''}, best other {best or float('nan'):.1f}, "
            f"{(best or float('nan')) / ours.median_us:.2f}x faster; {times} missing {missing}",
            flush=True,
        )


if __name__ == "__main__":
    run_program(AttentionBenchOptions, main)
