"""A map's last rows by themselves: what the whole map gives for them, bit for bit, in every format of weights."""

import pytest
import torch

from eagle3core.kernels import proof
from eagle3core.kernels.emulator import instructions as emulator
from eagle3core.kernels.gemm import CARD, epilogue_of, gemm, packed_inputs
from eagle3core.weights.packed import PackedLinear

CASE = {"kind": "qkv", "m": 5, "k": 512, "q_heads": 3, "kv_heads": 2, "head_dim": 32, "block": 16, "dtype": "bf16"}
OF_Q = CASE["q_heads"] * CASE["head_dim"]


@pytest.mark.emulated
@pytest.mark.parametrize(
    "format_",
    [
        {"packed": True, "bias": True},
        {"packed": False, "bias": True},
        {"packed": True, "fp8": True},
        {"packed": True, "fp8": "blocks"},
    ],
)
def test_keys_and_values_without_q_are_those_of_the_whole_map(format_):
    case = {**CASE, **format_}
    inputs = CARD.example(case, proof.generator(4, torch.device("cpu")), torch.device("cpu"))
    packed, epilogue = packed_inputs(case, inputs), epilogue_of(case)
    rows = OF_Q + 2 * CASE["kv_heads"] * CASE["head_dim"]
    whole = PackedLinear(
        epilogue, packed["w"], rows, CASE["k"], case["packed"], packed.get("bias"), packed.get("scales")
    )
    own = whole.from_row(OF_Q)
    assert own.rows == rows - OF_Q
    assert own.weight.untyped_storage().data_ptr() == packed["w"].untyped_storage().data_ptr(), "no copy"

    def caches(m: PackedLinear, q_heads: int) -> list[torch.Tensor]:
        outputs = CARD.outputs({**case, "q_heads": q_heads}, inputs)
        named = {**packed, **outputs, "bias": m.bias, "scales": m.scales}
        launches = gemm(
            "sm_90a", epilogue, x=packed["x"], w=m.weight, y=outputs["y"], k=m.k, packed=m.is_packed,
            weight_rows=m.rows,
            q_heads=q_heads, kv_heads=CASE["kv_heads"],
            operands={name: t for name, t in named.items() if name not in ("x", "w", "y") and t is not None},
        )  # fmt: skip
        emulator.execute(launches)
        return [outputs["second"], outputs["third"]]

    pairs = zip(caches(own, 0), caches(whole, CASE["q_heads"]), strict=True)
    assert [proof.differing(ours, theirs) for ours, theirs in pairs] == [0, 0]
