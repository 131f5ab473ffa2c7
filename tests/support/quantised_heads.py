"""FP8 by the book, and heads of whose values nothing but FP8 is left: what a quantised draft is compared with."""

from __future__ import annotations

import shutil
from pathlib import Path

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
