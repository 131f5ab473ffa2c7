"""FP8 by the book, and heads of whose values nothing but FP8 is left: what a quantised draft is compared with."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MAPS = ("fc.weight", "_proj.weight", "lm_head.weight")  # how the names of linear maps end


def e4m3_values() -> Tensor:
    """Every finite value of e4m3 that is not negative, ascending, fp64; a number's place is its seven bits."""
    codes = torch.arange(127)  # 127 is NaN
    exponent, fraction = codes >> 3, (codes & 7).double() / 8
    return torch.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))


def rounded_to_e4m3(wide: Tensor) -> Tensor:
    """Every value of `wide` (at most 448 in magnitude) as the nearest of e4m3, of two equally near the even one."""
    table = e4m3_values()
    distance = (wide.abs()[..., None].double() - table).abs()
    nearest = distance.amin(dim=-1, keepdim=True)
    candidates = (distance == nearest) * torch.where(torch.arange(127) % 2 == 0, 2, 1)
    return table[candidates.argmax(dim=-1)] * wide.double().sign()


def by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values of e4m3, fp64, and the fp32 scale of each row that is nearest to its largest magnitude over 448."""
    scales = weight.float().abs().amax(dim=1) / 448
    scales[scales == 0] = 1.0
    return rounded_to_e4m3(weight.float() / scales[:, None]), scales


def write_dequantised(draft: Path, directory: Path) -> Path:
    """A copy of a head, in double precision, whose maps hold exactly what FP8 with a scale a row leaves of them."""
    shutil.copytree(draft, directory)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(MAPS):
            stored, scales = by_rows(weight)
            weights[name] = (stored * scales[:, None].double()).contiguous()
        elif weight.is_floating_point():
            weights[name] = weight.double()
    save_file(weights, path)
    return directory


CONFIGS: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}}},
    },
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 24], "activation_scheme": "dynamic"},
}  # fmt: skip


def write_fp8(
    source: Path, directory: Path, method: str, *, beside: bool = False, block: tuple[int, int] = (16, 24)
) -> Path:
    """A copy of a checkpoint whose maps but the head are in e4m3, as `method` stores them; and what they mean, in
    `directory` with "_twin" behind its name.

    `beside`: ModelOpt's description is in its own file, and scales are those of activations too. `block`: of "fp8".
    """
    twin = directory.with_name(f"{directory.name}_twin")
    for folder in (directory, twin):
        shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    stored, meant = dict(weights), dict(weights)
    for name, weight in weights.items():
        if not name.endswith(MAPS[:2]):
            continue
        stem, (rows, k) = name.removesuffix(".weight"), weight.shape
        steps = {"modelopt": (rows, k), "compressed-tensors": (1, k), "fp8": block}[method]
        largest = torch.zeros(-(-rows // steps[0]), -(-k // steps[1]))
        for i, j in product(*map(range, largest.shape)):
            part = weight[i * steps[0] : (i + 1) * steps[0], j * steps[1] : (j + 1) * steps[1]]
            largest[i, j] = part.float().abs().max()
        scales = largest / 448
        wide = torch.stack([scales[i // steps[0], torch.arange(k) // steps[1]] for i in range(rows)])
        values = rounded_to_e4m3((weight.float() / wide).clamp(-448, 448))
        stored[name] = values.to(torch.float8_e4m3fn)
        meant[name] = (values * wide.double()).float()
        end = "weight_scale_inv" if method == "fp8" else "weight_scale"
        stored[f"{stem}.{end}"] = scales.reshape(()) if method == "modelopt" else scales
        if method == "modelopt":
            stored[f"{stem}.input_scale"] = torch.tensor(0.25)
    save_file(stored, directory / "model.safetensors")
    save_file(meant, twin / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    if beside:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    else:
        described = CONFIGS[method] | ({"weight_block_size": list(block)} if method == "fp8" else {})
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return directory


def write_in_blocks(source: Path, directory: Path, size: int = 128) -> Path:
    """A copy of a checkpoint of any size whose maps but the head are in e4m3 with a scale for `size` by `size` values,
    by torch's own rounding."""
    shutil.copytree(source, directory)
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        wide = weights[name].float()
        rows, k = wide.shape
        padded = torch.nn.functional.pad(wide, (0, -k % size, 0, -rows % size))
        scales = padded.view(-(-rows // size), size, -(-k // size), size).abs().amax((1, 3)).clamp_min(1e-12) / 448
        each = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :k]
        weights[name] = (wide / each).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
    save_file(weights, directory / "model.safetensors")
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)  # it names no scales
    config = json.loads((directory / "config.json").read_text())
    described = CONFIGS["fp8"] | {"weight_block_size": [size, size]}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return directory
