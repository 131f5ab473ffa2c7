"""Every key shape of a draft and its targets runs on the GPU and is right against a library's GEMM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.nn.functional as F

from eagle3core.kernels import proof, registry

pytestmark = pytest.mark.gpu

CARD = registry()["gemm"]
# Query, key and value rows of GPT-OSS-120B in one matrix of 5120 x 2880: 64 + 2 x 8 heads of 64.
GPT_OSS_QKV = {"kind": "qkv", "k": 2880, "dtype": "bf16", "packed": True, "norm": True, "q_heads": 64, "kv_heads": 8,
               "head_dim": 64, "block": 64}  # fmt: skip


def key_shapes() -> list[Any]:
    """One case for each size of W, with the row counts of the card's shapes in turn."""
    by_size: dict[tuple[int, int], list[Any]] = {}
    for case in CARD.shapes:
        if case["kind"] == "store":
            by_size.setdefault((case["n"], case["k"]), []).append(case)
    chosen = [cases[i % len(cases)] for i, cases in enumerate(by_size.values())]
    assert len({case["m"] for case in chosen}) >= 10
    return [pytest.param(case, id=f"m={case['m']} n={case['n']} k={case['k']}") for case in chosen]


@pytest.mark.parametrize("case", key_shapes())
def test_a_key_shape_is_as_right_as_a_library(case, gpu) -> None:
    device, arch, execute = gpu
    inputs = CARD.example(case, proof.generator(11, device), device)
    outputs = proof.run(CARD, arch, case, inputs, execute)
    library = replace(CARD, reference=lambda case, inputs: {"y": F.linear(inputs["x"], inputs["w"])})
    (found,) = proof.deviations(library, case, inputs, outputs)
    assert found.passes, found


@pytest.mark.parametrize("m", [1, 5, 16, 64])
def test_the_merged_query_key_value_map_of_gpt_oss_runs_and_is_right(m: int, gpu) -> None:
    device, arch, execute = gpu
    case = {**GPT_OSS_QKV, "m": m}
    inputs = CARD.example(case, proof.generator(m, device), device)
    assert inputs["w"].shape == (5120, 2880)
    outputs = proof.run(CARD, arch, case, inputs, execute)
    assert [d for d in proof.deviations(CARD, case, inputs, outputs) if not d.passes] == []
    assert proof.batch_dependence(CARD, arch, case, inputs, execute, [0, m - 1]) == []


@pytest.mark.parametrize("fp8", [True, "blocks"], ids=["rows", "blocks"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (4096, 14336)])
@pytest.mark.parametrize("m", [1, 4, 16, 24, 64, 512])
def test_maps_of_llama_8b_in_fp8_are_right_and_a_row_has_the_same_bits_alone(
    m: int, n: int, k: int, fp8: bool | str, gpu
) -> None:
    device, arch, execute = gpu
    case = {"kind": "store", "m": m, "n": n, "k": k, "dtype": "bf16", "packed": True, "fp8": fp8}
    inputs = CARD.example(case, proof.generator(m, device), device)
    outputs = proof.run(CARD, arch, case, inputs, execute)
    assert [d for d in proof.deviations(CARD, case, inputs, outputs) if not d.passes] == []
    one = replace(CARD, settings=({},))  # tests of small shapes have the other settings
    assert proof.batch_dependence(one, arch, case, inputs, execute, [0, m - 1]) == []
