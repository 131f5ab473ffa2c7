"""Attention's card: cases, reference, launches and costs, hand counts; `offers` has variants and settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3core.kernels.attention.cases import (
    BLOCK,
    attention_alone,
    attention_example,
    attention_outputs,
    attention_row_of,
    masked_of,
    path_len_of,
    prefixes_of,
    scales_of,
)
from eagle3core.kernels.attention.launcher import (
    attention,
    attention_scratch,
)
from eagle3core.kernels.attention.layout import BUNDLE, UNIT
from eagle3core.kernels.attention.offers import (
    attention_slow_variants,
    attention_sweep,
    attention_variants,
    attention_variants_of,
    measured_cases,
    plan_of,
    shape_of,
)
from eagle3core.kernels.attention.reference import paged_attention_reference, visible_keys, within_window
from eagle3core.kernels.card import Card, Case, Cost, Launch, Tensors


def attention_reference(case: Case, inputs: Tensors) -> Tensors:
    """The definition, and what the tile counters must say."""
    out = paged_attention_reference(
        inputs["q"], inputs["k"], inputs["v"], inputs["tables"], inputs["prefix"], inputs["mask"],
        window=case.get("window", 0), positions=inputs["positions"].long(), sinks=inputs.get("sinks"),
        scales=scales_of(case),
    )  # fmt: skip
    if not case.get("counting"):
        return {"out": out}
    return {"out": out, "counters": _counted(case, inputs)}


def _counted(case: Case, inputs: Tensors) -> Tensor:
    """Tiles by key unit and row tile, for at most 16 rows a key head (one row tile)."""
    n_keys = inputs["tables"].shape[1] * BLOCK
    visible = visible_keys(inputs["prefix"].long(), inputs["mask"], n_keys)
    if case.get("window"):
        near = within_window(case["window"], inputs["positions"].long(), inputs["prefix"].long(), n_keys)
        if case.get("earlier"):
            near |= torch.arange(n_keys, device=near.device) >= inputs["prefix"][:, None, None]
        visible &= near
    executed = visible.any(1).view(len(visible), -1, UNIT).any(-1)  # [B, units]
    prefix = inputs["prefix"].long()
    starts = torch.arange(n_keys // UNIT, device=prefix.device)[None] * UNIT
    span = starts < (prefix + masked_of(case))[:, None]
    if case.get("window"):
        span &= starts + UNIT > (prefix + 1 - case["window"])[:, None]
    span &= (prefix >= 0)[:, None]
    executed &= span
    total, in_span, done = span.numel(), int(span.sum()), int(executed.sum())
    counts = torch.tensor([total, total - in_span, in_span - done, done], dtype=torch.int32, device=prefix.device)
    return counts * int(case["kv_heads"])


def attention_launches(arch: str, case: Case, inputs: Tensors, outputs: Tensors, **setting: Any) -> list[Launch]:
    """The two launches of a case; `setting` replaces fields of the chosen plan."""
    shape, q = shape_of(arch, case), inputs["q"]
    return attention(
        arch, q=q, k_blocks=inputs["k"], v_blocks=inputs["v"], block_tables=inputs["tables"],
        prefix_lens=inputs["prefix"], masks=inputs["words"], out=outputs["out"],
        scratch=attention_scratch(shape, q.shape[0], case["tokens"], case["kv_heads"], q.device),
        order=(shape.splits, shape.streams), plan=plan_of(arch, case, setting), window=case.get("window", 0),
        positions=inputs["positions"], sinks=inputs.get("sinks"), counters=outputs.get("counters"),
        earlier=case.get("earlier", 0), path_len=path_len_of(case, inputs),
        scales=scales_of(case),
    )  # fmt: skip


def attention_cost(case: Case) -> Cost:
    """Every key and value once, queries, output, tables; two passes, of which the second waits for the first."""
    tokens, masked, dim, window = case["tokens"], masked_of(case), case["dim"], case.get("window", 0)
    n_bytes, flops = 0, 0
    for prefix in prefixes_of(case):
        if prefix < 0:
            continue
        first = max(0, prefix + 1 - window) if window else 0
        keys = prefix + masked - first
        n_bytes += 2 * keys * case["kv_heads"] * dim * (1 if case.get("fp8") else 2)  # keys and values
        n_bytes += 2 * tokens * case["heads"] * dim * 2  # queries and output
        n_bytes += 4 * (-(-(prefix + masked) // BLOCK) - first // BLOCK) + 4 * tokens * -(-masked // 32)
        flops += 4 * tokens * case["heads"] * dim * keys
    return Cost(n_bytes, flops, 2)


def _tiny(**about: Any) -> Case:
    return {"dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "order": (2, 2), "tokens": 3, **about}


CARD = Card(
    name="attention",
    equation="out = softmax(q k^T / sqrt(D), masked) v over a paged cache",
    source="arXiv 1706.03762; paging arXiv 2309.06180",
    example=attention_example,
    outputs=attention_outputs,
    reference=attention_reference,
    launches=attention_launches,
    cost=attention_cost,
    variants=attention_variants,
    slow_variants=attention_slow_variants,
    variants_of=attention_variants_of,
    sweep=attention_sweep,
    order={"key unit": UNIT, "splits": 16, "streams": "4, or 8 at head size 64", "bundle": BUNDLE},
    neutral={
        "row_warps": "0, 2, 4, 8 (which kernel, and rows of a block; at 4 and 8 also attention_group's)",
        "by_split": "attention_splits in place of attention_streams, of up to 16 rows",
        "groups": "1 to streams",
        "units": "1, 2; with row_warps also 4, from a quarter of row_warps",
        "stages": "2 or more; with row_warps 3",
        "run": "1 to splits",
        "grouped": "attention_group or another, as the rule says",
    },
    settings=(
        {},
        {"row_warps": 2, "groups": 2, "units": 1, "stages": 3, "run": 2, "grouped": False},
        {"stages": 3, "run": 2},
        {"by_split": True, "row_warps": 0, "units": 1, "stages": 2},
    ),
    cases=(
        _tiny(prefix=(93, 14), tree="chain"),
        _tiny(prefix=(41,), dim=128, tokens=5, heads=8, kv_heads=2, tree="random", dtype="f16", counting=False),
        _tiny(prefix=(75, -3), window=20, sinks=True, counting=True, tokens=2),
        _tiny(prefix=(37, -4), earlier=5, counting=True),
        _tiny(prefix=(75, 9), earlier=5, window=20, counting=True),
        _tiny(prefix=(41, -2), tokens=5, paths=True),
        _tiny(prefix=(93, 14), tree="chain", fp8=True),
        _tiny(prefix=(70,), tokens=4, window=20, sinks=True, paths=True),
    ),
    slow_cases=(
        _tiny(prefix=(150, 0, 63), dim=128, heads=4, tokens=4, order=(4, 2), tree="chain"),
        _tiny(prefix=(70,), heads=16, tokens=7, tree="random"),
        _tiny(prefix=(50,), heads=2, tokens=33, tree="random", counting=False, sinks=True),
        _tiny(prefix=(200,), heads=16, kv_heads=1, tokens=9, window=33, order=(2, 4), tree="chain"),
        _tiny(prefix=(17, 64), heads=3, tokens=1, tree="none"),
        _tiny(prefix=(0, 40), earlier=61, tokens=4, sinks=True),
        _tiny(prefix=(21, 64, -1), earlier=61, tokens=4, dim=128, heads=4, order=(4, 2), tree="chain"),
        _tiny(prefix=(9,), earlier=150, tokens=5, heads=8, dtype="f16"),
        _tiny(prefix=(30,), earlier=247, tokens=9, dim=128, heads=3),
        _tiny(prefix=(16,), earlier=20, tokens=1, tree="none"),
        _tiny(prefix=(30, 61), earlier=4, tokens=4, words=3),
        _tiny(prefix=(200, -2), earlier=40, tokens=10, heads=4, window=64, dim=128, order=(4, 2)),
        _tiny(prefix=(130,), heads=8, tokens=9, earlier=27, window=40, dtype="f16"),
        _tiny(prefix=(50,), words=3),
        _tiny(prefix=(13, -2, 95), heads=4, tokens=9, paths=True, sinks=True),
        _tiny(prefix=(160, 0), tokens=40, paths=True),
        _tiny(prefix=(0, 64), dim=128, heads=4, tokens=7, order=(4, 2), paths=True),
        _tiny(prefix=(63,), heads=3, tokens=17, paths=True, tree="chain", dtype="f16"),
        _tiny(prefix=(150, 0, 63), dim=128, heads=4, tokens=2, order=(4, 2), tree="chain", fp8=True, sinks=True),
        _tiny(prefix=(70,), heads=16, tokens=3, dim=128, fp8=True, dtype="f16"),
        _tiny(prefix=(50,), heads=2, tokens=17, dim=128, fp8=True, counting=False),
        _tiny(prefix=(13, -2, 95), heads=4, tokens=6, paths=True, fp8=True),
        _tiny(prefix=(40, 0), tokens=5, dim=128, heads=4, paths=True, fp8=True),
        _tiny(prefix=(75, 9), earlier=5, window=20, counting=True, fp8=True),
        _tiny(prefix=(150, -2, 9), heads=16, kv_heads=2, tokens=9, window=40, sinks=True, paths=True),
        _tiny(prefix=(77,), dim=128, heads=4, tokens=17, window=6, order=(4, 2), paths=True, tree="chain"),
        _tiny(prefix=(200, 30), heads=8, tokens=17, window=128, sinks=True, order=(2, 4), tree="chain"),
    ),
    shapes=measured_cases(),
    hand_counts=(
        # 1024 keys x 8 heads x 128 x 2 bytes x (k, v) = 4 MiB; q, out 2 x 32 x 128 x 2; 16 table entries, 1 word.
        (
            {"dtype": "bf16", "dim": 128, "heads": 32, "kv_heads": 8, "batch": 1, "kv": 1024, "tokens": 1},
            Cost(4_194_304 + 16_384 + 64 + 4, 4 * 32 * 128 * 1024, 2),
        ),
        # Two sequences; a window of 100 leaves keys 901.. of 1000 + 4 to any row: 103 keys, blocks 14 and 15.
        (
            {"dtype": "bf16", "dim": 64, "heads": 8, "kv_heads": 1, "prefix": (1000, 1000), "tokens": 4, "window": 100},
            Cost(2 * (2 * 103 * 64 * 2 + 2 * 4 * 8 * 64 * 2 + 4 * 2 + 16), 2 * 4 * 4 * 8 * 64 * 103, 2),
        ),
        # 442 old keys, 60 of earlier passes, 10 new: 512 x 8 x 128 x 2 x 2 = 2 MiB; 8 table entries; 70 bits, 3 words.
        (
            {"dtype": "bf16", "dim": 128, "heads": 32, "kv_heads": 8, "prefix": (442,), "tokens": 10, "earlier": 60},
            Cost(2_097_152 + 2 * 10 * 32 * 128 * 2 + 32 + 10 * 3 * 4, 4 * 10 * 32 * 128 * 512, 2),
        ),
    ),
    alone=attention_alone,
    row_of=attention_row_of,
    n_rows=lambda case: case["tokens"] * len(prefixes_of(case)),
)
