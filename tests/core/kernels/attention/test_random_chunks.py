"""Chunks of random prompts: attention by warpgroups whose blocks have all keys of their rows, by warps that share rows.

Most have two blocks of rows, which fetch for each other.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from rings import seeds
from warpgroup_cases import ARCH, ONE, ROWS

from eagle3core.kernels import proof
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.plan import GROUP_ROWS
from eagle3core.kernels.card import Case
from eagle3core.kernels.emulator import instructions as emulator

CPU = torch.device("cpu")


def drawn(draw: Random) -> tuple[Case, dict[str, Any]]:
    splits, streams, heads = draw.choice([2, 4, 8]), draw.choice([2, 4]), draw.choice([4, 8])
    prefix = tuple(
        draw.choice([-1, 0, draw.randint(1, 60), draw.randint(1, 400), draw.randint(200, 700)])
        for _ in range(draw.randint(1, 3))
    )
    case: Case = {
        "dtype": "bf16", "dim": 64, "heads": heads, "kv_heads": 1, "order": (splits, streams), "tree": "chain",
        "prefix": prefix, "tokens": draw.randint(GROUP_ROWS // heads, 2 * GROUP_ROWS // heads),
        "sinks": draw.random() < 0.3, "window": draw.choice([0, 0, draw.randint(1, 200)]),
    }  # fmt: skip
    short = streams % 4 == 0 and draw.random() < 0.5
    return case, {**ONE, "stages": draw.randint(2, 3), "run": splits, "short": short}


@pytest.mark.emulated
@pytest.mark.parametrize("seed", seeds(2, 6, 192))
def test_any_chunk_has_the_bits_of_warps_that_share_rows(seed: int) -> None:
    case, setting = drawn(Random(seed))
    inputs = CARD.example(case, proof.generator(seed, CPU), CPU)
    wanted = proof.run(CARD, ARCH, case, inputs, emulator.execute, ROWS)
    ours = proof.run(CARD, ARCH, case, inputs, emulator.execute, setting)
    assert ours["out"].isfinite().all()
    assert [name for name in ours if proof.differing(ours[name], wanted[name])] == [], (case, setting)
