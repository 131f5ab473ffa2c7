"""What a step of the 8B pair takes at any rows and depth, from the committed times of its products on an H200.

At one row the sum agrees with the engine's own measured steps (`speed.jsonl`, 512 tokens) to 2 %: a test says so.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

H200 = Path(__file__).parent.parent.parent / "reports" / "reference" / "h200"
QKV, OUT, GATE_UP, DOWN, HEAD = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)
DRAFT_FC, DRAFT_QKV, DRAFT_HEAD = (4096, 12288), (6144, 8192), (32000, 4096)
N_LAYERS = 32
OTHERS_US, LEVEL_US, KEEP_US = 140.0, 20.0, 3.0  # attention at 512 tokens and bookkeeping; a level's; a copy's

Product = tuple[int, int]


@cache
def product_times() -> dict[Product, dict[int, float]]:
    """Microseconds of a product (n, k) by its rows."""
    found: dict[Product, dict[int, float]] = {}
    for line in (H200 / "kernels.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        shape, values = row["parameters"], row["values"] or {}
        if row["name"] == "gemm" and "time_us" in values and shape.get("shape.kind") == "store":
            found.setdefault((shape["shape.n"], shape["shape.k"]), {})[shape["shape.m"]] = values["time_us"]
    return found


@cache
def product_us(product: Product, rows: int) -> float:
    """Between measured rows, and beyond the last two, along a line."""
    times = sorted(product_times()[product].items())
    pairs = list(pairwise(times))
    (a, low), (b, high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
    return low + (high - low) * (rows - a) / (b - a)


def layer_us(rows: int, qkv: Product = QKV) -> float:
    return sum(product_us(product, rows) for product in (qkv, OUT, GATE_UP, DOWN))


@cache
def step_us(depth: int, batch: int) -> float:
    """Of a step of `depth` drafts for `batch` sequences."""
    rows = batch * (depth + 1)
    took = N_LAYERS * layer_us(rows) + product_us(HEAD, rows) + OTHERS_US
    if depth:
        took += product_us(DRAFT_FC, rows) + layer_us(rows, DRAFT_QKV) + (depth - 1) * layer_us(batch, DRAFT_QKV)
        took += depth * (product_us(DRAFT_HEAD, batch) + LEVEL_US)
    return took


def reading_us(batch: int, n_kept: int) -> float:
    """What a step without drafts takes more when the draft reads `n_kept` entries a sequence."""
    return product_us(DRAFT_FC, n_kept * batch) + product_us(DRAFT_QKV, n_kept * batch) + 10.0
