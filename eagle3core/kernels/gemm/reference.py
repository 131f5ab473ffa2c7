"""The GEMM op in plain torch, and fresh inputs for its proofs.

A case has: kind (see `epilogue.Epilogue`), m rows of x, n columns of y, k, dtype ("bf16", "f16"), packed; and if
wanted fp8 (W in e4m3, packed, with a scale a row, or with "blocks" one for 8 rows by 128 k), norm (scale by 1 / rms),
bias, residual=False; for qkv q_heads, kv_heads, head_dim, block instead of n.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3core.kernels.card import E4M3, Case, Tensors, poison
from eagle3core.kernels.gemm.epilogue import PARTIALS_STEP, Epilogue, quads_of
from eagle3core.kernels.gemm.fp8.blocks import blocks_of
from eagle3core.kernels.gemm.fp8.operands import by_element
from eagle3core.kernels.gemm.order.weight import pack_scales, pack_weight
from eagle3core.kernels.isa.powers import pieces_of

EPS = 1e-5
_DTYPE = {"bf16": torch.bfloat16, "f16": torch.float16}
_POSITIONS = 37  # rows of the rotary table in a case


def epilogue_of(case: Case) -> Epilogue:
    """The epilogue that a case asks for."""
    return Epilogue(
        kind=case["kind"],
        quads=quads_of(case["k"]) if case.get("norm") else 0,
        has_bias=bool(case.get("bias")),
        has_residual=bool(case.get("residual", True)),
        head_dim=case.get("head_dim", 0),
        block=case.get("block", 0),
        has_powers=bool(case.get("powers")),
        e4m3_cache=bool(case.get("e4m3_cache")),
    )


def n_columns(case: Case) -> int:
    """Columns of y; for qkv those of q."""
    return int(case["q_heads"] * case["head_dim"] if case["kind"] == "qkv" else case["n"])


def n_weight_rows(case: Case) -> int:
    """Rows of W: the columns of y, twice them for gate and up, all heads for qkv."""
    if case["kind"] == "qkv":
        return int((case["q_heads"] + 2 * case["kv_heads"]) * case["head_dim"])
    return int(case["n"] * (2 if case["kind"] == "swiglu" else 1))


def scales_shape(case: Case) -> tuple[int, ...]:
    """Of W's scales in a case with `fp8`, before they are packed: `[n_w]`, or `[n_w / 8, blocks]`."""
    n_w = n_weight_rows(case)
    return (n_w // 8, blocks_of(case["k"])) if case["fp8"] == "blocks" else (n_w,)


def packed_inputs(case: Case, inputs: Tensors) -> Tensors:
    """Inputs of a case as kernels take them: W, and scales of blocks, in the order in which they are read."""
    if not case.get("packed"):
        return inputs
    epilogue = epilogue_of(case)
    made = {**inputs, "w": pack_weight(inputs["w"], epilogue)}
    if case.get("fp8") == "blocks":
        made["scales"] = pack_scales(inputs["scales"], epilogue)
    return made


def pitch_of(n: int) -> int:
    """Partial sums of squares kept for a row of n columns: n / 16 rounded up to whole groups."""
    return quads_of(n) * PARTIALS_STEP


def partial_squares(h: Tensor) -> Tensor:
    """Sums of squares `[M, pitch]` f32 of every 16 columns of `h: [M, N]`, zeros after the last."""
    wide = h.to(torch.float64 if h.dtype == torch.float64 else torch.float32)
    sums = wide.square().view(*h.shape[:-1], -1, 16).sum(-1)
    return F.pad(sums, (0, pitch_of(h.shape[-1]) - sums.shape[-1]))


def gemm_example(case: Case, generator: torch.Generator, device: torch.device) -> Tensors:
    """Random operands: unit x, W of scale 1 / sqrt(k), so that y has unit scale."""
    m, k, n_w, dtype = case["m"], case["k"], n_weight_rows(case), _DTYPE[case["dtype"]]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    made: Tensors = {"x": normal(m, k).to(dtype), "w": (normal(n_w, k) * k**-0.5).to(dtype)}
    if case.get("fp8"):  # any byte of the format but its two NaNs, and scales that bring y to unit scale
        codes = torch.randint(0, 254, (n_w, k), generator=generator, device=device, dtype=torch.int32)
        made["w"] = (codes + (codes >= 127)).to(torch.uint8).view(E4M3)
        made["scales"] = (1 + normal(*scales_shape(case)).abs()) * (k**-0.5 / 100)
    if case.get("norm"):
        made["sums"] = partial_squares(normal(m, k) * (0.5 + torch.arange(m, device=device)[:, None]))
    if case.get("bias"):
        made["bias"] = normal(n_w).to(dtype)
    if case["kind"] == "residual":
        made["gain"] = (1 + 0.1 * normal(case["n"])).to(dtype)
        if case.get("residual", True):
            made["residual"] = normal(m, case["n"]).to(dtype)
    if case["kind"] == "qkv":
        angles = normal(_POSITIONS, case["head_dim"] // 2)
        made["table"] = torch.stack([angles.cos(), angles.sin()], -1)
        made["positions"] = torch.randint(_POSITIONS, (m,), generator=generator, device=device, dtype=torch.int32)
        slots = torch.randperm(m + case["block"], generator=generator, device=device)[:m]
        made["slots"] = torch.where(torch.arange(m, device=device) == 1, -1, slots).int()  # row 1 is padding
    return made


def gemm_outputs(case: Case, inputs: Tensors) -> Tensors:
    """Poisoned outputs of a case."""
    x = inputs["x"]
    m, n, dtype, device = case["m"], n_columns(case), x.dtype, x.device
    made = {"y": poison(m, n, dtype=dtype, device=device)}
    if case["kind"] == "residual":
        made["second"] = poison(m, n, dtype=dtype, device=device)
        made["third"] = poison(m, pitch_of(n), dtype=torch.float32, device=device)
        made["third"][:, n // 16 :] = 0  # padding that the engine zeroes once and no kernel writes
    if case["kind"] == "head":
        made["second"] = poison(m, n // 16, dtype=torch.float32, device=device)
        made["third"] = poison(m, n // 16, dtype=torch.float32 if case.get("powers") else torch.int32, device=device)
    if case["kind"] == "qkv":
        n_blocks = -(-int(inputs["slots"].max() + 1) // case["block"]) + 1
        shape = (n_blocks, case["kv_heads"], case["block"], case["head_dim"])
        made["second"], made["third"] = (poison(*shape, dtype=dtype, device=device) for _ in range(2))
    return made


def gemm_reference(case: Case, inputs: Tensors) -> Tensors:
    """The outputs in plain torch, in the dtype of the inputs."""
    weight, scales = inputs["w"].to(inputs["x"].dtype), inputs.get("scales")
    if scales is not None and scales.ndim > 1:
        weight = weight * by_element(scales.to(weight.dtype), case["k"])
    v = F.linear(inputs["x"], weight)
    if scales is not None and scales.ndim == 1:
        v = v * scales.to(v.dtype)
    if "sums" in inputs:
        mean = inputs["sums"].sum(-1, keepdim=True) / case["k"]
        v = v * torch.rsqrt(mean + EPS).to(v.dtype)
    if "bias" in inputs:
        v = v + inputs["bias"]
    if case["kind"] == "residual":
        h = inputs["residual"] + v if "residual" in inputs else v
        return {"y": h, "second": h * inputs["gain"], "third": partial_squares(h)}
    if case["kind"] == "swiglu":
        gate, up = v.chunk(2, dim=-1)
        return {"y": F.silu(gate) * up}
    if case["kind"] == "qkv":
        return _qkv_reference(case, inputs, v)
    if case["kind"] == "head" and case.get("powers"):
        best, powers = pieces_of(v)
        return {"y": v, "second": best, "third": powers}
    if case["kind"] == "head":
        return {"y": v, "second": v.view(case["m"], -1, 16).amax(-1).to(inputs.get("sums", v.float()).dtype)}
    return {"y": v}


def _qkv_reference(case: Case, inputs: Tensors, v: Tensor) -> Tensors:
    heads = v.view(case["m"], -1, case["head_dim"])  # [M, H + 2 K, D]
    cos, sin = inputs["table"][inputs["positions"].long()].to(v.dtype).unbind(-1)  # [M, D / 2]
    q, k, values = heads.tensor_split([case["q_heads"], case["q_heads"] + case["kv_heads"]], dim=1)
    outputs: Tensors = {"y": _rotated(q, cos, sin).flatten(1)}
    slots = inputs["slots"].long()
    written = slots >= 0
    block, offset = slots[written] // case["block"], slots[written] % case["block"]
    for name, rows in (("second", _rotated(k, cos, sin)), ("third", values)):
        blocks = gemm_outputs(case, inputs)[name].to(v.dtype)
        blocks[block, :, offset] = rows[written]
        outputs[name] = blocks
    return outputs


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def gemm_alone(case: Case, inputs: Tensors, row: int) -> tuple[Case, Tensors]:
    """The case and inputs of one row of x."""
    by_row = ("x", "sums", "residual", "positions", "slots")
    alone = {name: t[row : row + 1].contiguous() if name in by_row else t for name, t in inputs.items()}
    return {**case, "m": 1}, alone


def gemm_row_of(case: Case, inputs: Tensors, outputs: Tensors, row: int) -> Tensors:
    """What one row of x brought about."""
    if case["kind"] != "qkv":
        return {name: tensor[row] for name, tensor in outputs.items()}
    slot = int(inputs["slots"][row])
    made = {"y": outputs["y"][row]}
    if slot >= 0:
        made |= {name: outputs[name][slot // case["block"], :, slot % case["block"]] for name in ("second", "third")}
    return made


def gemm_invariants(case: Case, inputs: Tensors, outputs: Tensors) -> list[str]:
    """The head's best of every 16 logits is that of the logits it stored, lowest column first."""
    if case["kind"] != "head":
        return []
    groups = outputs["y"].float().nan_to_num(torch.inf, torch.inf, -torch.inf).view(case["m"], -1, 16)
    best = groups.amax(-1)
    first = (groups == best[..., None]).int().argmax(-1)
    column = first + 16 * torch.arange(best.shape[-1], device=best.device)
    faults: list[tuple[str, Any]] = [("value", outputs["second"] != best)]
    if not case.get("powers"):
        faults.append(("column", outputs["third"] != column))
    return [f"{int(wrong.sum())} {what}s of the best of 16 are wrong" for what, wrong in faults if wrong.any()]
