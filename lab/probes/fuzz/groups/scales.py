"""Scales of weights in FP8 and MXFP4, and of a cache in FP8: damaged one at a time, to the engine.

A scale that gives no number, or belongs to no weight, would change every answer without a word. So of most damage it is
known that the engine has to refuse it, and being taken is a finding.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.probes.fuzz.damage import as_bytes
from lab.probes.fuzz.experts import gpt_oss, in_blocks, qwen3_moe
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.heads import LAYERS, Model, Weights, in_fp8, target_model
from lab.probes.fuzz.pairs import SmallPair, open_pair, prepare_pair

_HOW = "how.json"  # settings of the engine, and what is wrong where that has to be refused
_OF_WEIGHTS, _OF_CACHE = (".weight_scale", ".weight_scale_inv", "proj_scales"), (".k_scale", ".v_scale")
_WIDE = 160  # of an expert, so that its down map reads more than one block of 128
_CACHE = {"cache_dtype": "fp8"}

Damaged = tuple[Tensor | None, str]  # the tensor, None if it is gone; and what is wrong, "" where it may be taken


def _models() -> list[Model]:
    """Targets in every format with scales, each with those of a cache."""
    dense = target_model("llama", {})
    made = [
        in_fp8(dense), in_blocks(dense, (16, 16)), in_blocks(dense, (8, 128)), in_fp8(qwen3_moe()),
        in_blocks(qwen3_moe(inner=_WIDE), (16, 128)), gpt_oss(is_mxfp4=True),
    ]  # fmt: skip
    names = [f"model.layers.{i}.self_attn{end}" for i in range(LAYERS) for end in _OF_CACHE]
    return [Model(one.config, {**one.weights, **dict.fromkeys(names, torch.tensor(0.5))}) for one in made]


def _prepare(folder: Path) -> tuple[SmallPair, list[Model]]:
    pair, models = prepare_pair(folder), _models()
    for i, model in enumerate(models):
        _write(folder / f"valid-{i}", model, model.weights, {"settings": _CACHE, "wrong": ""})
        _open((pair, models), folder / f"valid-{i}")
    return pair, models


def _write(folder: Path, model: Model, weights: Weights, how: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(as_bytes(model.config))
    (folder / _HOW).write_text(json.dumps(how))
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, folder / "model.safetensors")


def _make(prepared: tuple[SmallPair, list[Model]], random: Random, folder: Path) -> None:
    """One scale of one target; the cache is in FP8 where it is one of the cache's."""
    model = random.choice(prepared[1])
    ends = random.choice((_OF_WEIGHTS, _OF_WEIGHTS, _OF_WEIGHTS, _OF_CACHE))
    name = random.choice([name for name in model.weights if name.endswith(ends)])
    settings = {"target_weights": random.choice(("as_stored", "fp8", "dequantised"))}
    settings |= _CACHE if ends == _OF_CACHE or random.random() < 0.3 else {}
    damaged, wrong = random.choice((_refilled, _refilled, _reshaped, _retyped, _gone))(model.weights[name], random)
    if ends == _OF_CACHE and damaged is None:
        wrong = ""  # without one it is 1
    weights = {other: tensor for other, tensor in model.weights.items() if other != name}
    if damaged is not None:
        weights[name] = damaged
    _write(folder, model, weights, {"settings": settings, "wrong": f"{name} {wrong}" if wrong else ""})


def _refilled(scale: Tensor, random: Random) -> Damaged:
    """One value of it, or all, that is no scale."""
    fill: float
    if scale.dtype == torch.uint8:
        fill, wrong = random.choice(((255, "holds 255"), (254, ""), (0, "")))
    else:
        fill, wrong = random.choice((
            (float("nan"), "holds NaN"), (0.0, "holds 0"), (-0.5, "holds -0.5"), (float("inf"), "holds infinity"),
            (-float("inf"), "holds -infinity"), (1e-45, ""), (1e30, ""),
        ))  # fmt: skip
    made = scale.clone().flatten()
    made[slice(None) if random.random() < 0.5 else random.randrange(len(made))] = fill
    return made.view(scale.shape), wrong


def _reshaped(scale: Tensor, random: Random) -> Damaged:
    """Another number of them, none, or other axes."""
    flat = scale.flatten()
    made = random.choice((torch.cat([flat, flat]), flat[:0], flat[:-1], flat[None, None], scale.mT[..., None]))
    # One number may stand for a whole map; a column may be given as a list.
    may_be_meant = made.numel() in (1, scale.numel()) and scale.dtype != torch.uint8
    return made, "" if may_be_meant else f"has shape {list(made.shape)}"


def _retyped(scale: Tensor, random: Random) -> Damaged:
    """Another dtype: of floats one that holds the same is meant."""
    dtype = random.choice((torch.int8, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float64))
    if dtype == scale.dtype:
        return scale, ""
    same = dtype.is_floating_point and scale.dtype.is_floating_point
    return scale.to(dtype), "" if same or not scale.ndim else f"is {dtype}"


def _gone(scale: Tensor, random: Random) -> Damaged:
    return None, "is missing"


def _open(prepared: tuple[SmallPair, list[Model]], folder: Path) -> None:
    how = json.loads((folder / _HOW).read_text())
    open_pair(folder, prepared[0].draft, **how["settings"])
    if how["wrong"]:
        raise AssertionError(f"taken, and {how['wrong']}")


GROUPS = (Group("scales", "scales of FP8, MXFP4 and of a cache, to the engine", _prepare, _make, _open),)
