"""Checkpoints whose maps are stored in FP8 (e4m3): recognised by their configs, read as they are or as what they mean.

W[r, c] = stored[r, c] * scale, with one scale a tensor, a row, or a block of 128 x 128. A map is dequantised when it is
read, or keeps its bytes beside scales in one of two forms: a row each, or 8 rows by 128 k each. Scales of activations
are left out: they stay in the compute dtype here, which is only closer to the model before it was quantised. Those of a
cache are read where the engine keeps it in FP8 (`read_cache_scales`). Every other way of quantising is left to whoever
refuses it by name.

Source: ModelOpt's exporter (hf_quant_config.json), compressed-tensors (config_groups), and the block format of
DeepSeek-V3's release (`weight_scale_inv`, which multiplies despite its name), as transformers 5.17 reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.tensors import NamedTensors, require_finite
from eagle3core.errors import CheckpointError, shown
from eagle3core.geometry import CacheScales

KEYS = ("quantization_config", "compression_config")
BESIDE = "hf_quant_config.json"  # as ModelOpt writes it
_SCALES = (".weight_scale", ".weight_scale_inv")
# Where a layer's attention has the scale of its keys ("k") or values ("v"): as compressed-tensors and ModelOpt name it,
# then older writers' names.
_CACHE_SCALES = ("self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{0}_proj.output_scale",
                 "self_attn.attn.{0}_scale", "self_attn.kv_scale")  # fmt: skip
OF_A_CACHE = tuple({f".{name.format(side)}": side for name in _CACHE_SCALES for side in "kv"})  # how such names end
_OF_OTHERS = (".input_scale", ".k_scale", ".v_scale", *OF_A_CACHE)  # of activations and of a cache
_USUAL_BLOCK = (128, 128)
_GROUP = (8, 128)  # rows and k of a scale in the form that is kept: any block of multiples of both is made of such
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_AGAIN = "export the checkpoint again, or use the bf16 weights of the same model"


def scale_name(name: str) -> str:
    """Where the scales of a map that is kept in e4m3 lie, beside the map itself."""
    return f"{name}_scale"


@dataclass(frozen=True)
class Fp8Scheme:
    """FP8 as a config describes it.

    Attributes:
        said: where and how, for people. block: rows and columns of W that share a scale, where blocks do.
    """

    said: str
    block: tuple[int, int] = _USUAL_BLOCK


def find_fp8(config: Settings, directory: Path) -> Fp8Scheme | None:
    """The scheme that a checkpoint's configs name; None where they name none, or one that is not read.

    Raises:
        CheckpointError: a config that is no object.
    """
    found = []
    if (directory / BESIDE).is_file():
        nested = Settings.read(directory / BESIDE).nested("quantization")
        found.append(None if nested is None else _of_modelopt(nested))
    for key in KEYS:
        method = config.nested(key)
        if method is not None:
            found.append(_of_config(method))
    schemes = [scheme for scheme in found if scheme is not None]
    return schemes[-1] if schemes and len(schemes) == len(found) else None


def dequantised(files: NamedTensors, scheme: Fp8Scheme | None) -> NamedTensors:
    """The tensors of a checkpoint as the values they mean; `files` themselves without a scheme.

    Raises:
        CheckpointError: a scheme, and no tensor that has a scale.
    """
    return files if scheme is None else Fp8Files(files, scheme)


def without_fp8(config: Settings) -> Settings:
    """A config as of the model before it was quantised."""
    return Settings({key: value for key, value in config.values.items() if key not in KEYS}, config.source)


def read_cache_scales(files: NamedTensors, n_layers: int) -> tuple[CacheScales, ...]:
    """What each layer's keys and values are divided by in a cache of FP8: 1 where the files as stored bring no scale.

    Raises:
        CheckpointError: a scale that is no single number above 0.
    """
    names = set(files.names)

    def read(layer: int, side: str) -> float:
        forms = (f"model.layers.{layer}.{form.format(side)}" for form in _CACHE_SCALES)
        name = next((name for name in forms if name in names), None)
        if name is None:
            return 1.0
        scale = files.read(name).double()
        if scale.numel() != 1 or not 0.0 < (value := float(scale)) < float("inf"):
            found = (
                f"{files.where(name)} has shape {list(scale.shape)}, values from {shown(scale.flatten()[:3].tolist())}"
            )
            allowed = "one number above 0 for all keys, or values, of a layer"
            raise CheckpointError(found, allowed, f"leave cache_dtype out, or {_AGAIN}")
        return value

    return tuple(CacheScales(read(i, "k"), read(i, "v")) for i in range(n_layers))


class Fp8Files(NamedTensors):
    """Tensors of which some are stored in e4m3; these are read in fp32, and their scales have no names of their own.

    Args:
        files: as stored. scheme: of the config.

    Raises:
        CheckpointError: none of them has a scale.
    """

    def __init__(self, files: NamedTensors, scheme: Fp8Scheme) -> None:
        super().__init__(files.directory)
        self.files, self.scheme = files, scheme
        self.described_in, self.decisions, self.of_taps = files.described_in, files.decisions, files.of_taps
        stored = set(files.names)
        self._scale_of = {
            f"{name.removesuffix(end)}.weight": name
            for end in _SCALES for name in stored
            if name.endswith(end) and f"{name.removesuffix(end)}.weight" in stored
        }  # fmt: skip
        hidden = {*self._scale_of.values(), *(name for name in stored if name.endswith(_OF_OTHERS))}
        self._names = sorted(stored - hidden)
        if not self._scale_of:
            raise CheckpointError(
                f"{scheme.said}, and no tensor of {files.directory} has a scale",
                f"maps in e4m3, each with one of {', '.join(_SCALES)}",
                "remove the key if the weights are not quantised, or download the checkpoint again",
            )

    @property
    def names(self) -> list[str]:
        """Every tensor's name but those of scales, sorted."""
        return self._names

    def where(self, name: str) -> str:
        """File and name of a tensor, for messages."""
        return self.files.where(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.files.shape(name)

    def read(self, name: str) -> Tensor:
        """The tensor's values, on the CPU: as stored, or of e4m3 times their scales, fp32.

        Raises:
            CheckpointError: bytes that cannot be decoded, or a scale that does not belong to the tensor.
        """
        stored = self.files.read(name)
        is_fp8 = stored.dtype == torch.float8_e4m3fn
        if is_fp8 != (name in self._scale_of):
            state = "is in e4m3 without a scale" if is_fp8 else f"has a scale and is {stored.dtype}"
            raise CheckpointError(f"{self.where(name)} {state}", "maps in e4m3 with a scale, others without", _AGAIN)
        return stored.float() * self._scales(name, stored) if is_fp8 else stored

    def read_weight(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu", *, casts: bool = True,
    ) -> Tensor:  # fmt: skip
        """As of any container; what is dequantised is cast at once, since it takes memory of its own anyway."""
        return super().read_weight(name, shape, dtype, device, casts=casts or name in self._scale_of)

    def read_kept(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
        """A map `[rows, k]` as it is stored, and its scales fp32, `[rows]` or `[rows / 8, blocks]` of 128 k.

        None of a tensor that is not stored in e4m3, or whose blocks are not made of such.

        Raises:
            CheckpointError: as `read_weight`.
        """
        if name not in self._scale_of or len(shape) != 2:
            return None
        self.check_shape(name, shape)
        stored = self.files.read(name)
        if stored.dtype != torch.float8_e4m3fn:
            return None
        require_finite(stored, torch.float32, self.where(name), _AGAIN)
        scales, (rows, k), (tall, wide) = self._scales(name, stored), shape, self.scheme.block
        largest = scales * torch.finfo(torch.float8_e4m3fn).max
        require_finite(largest, torch.float32, f"{self.files.where(self._scale_of[name])} times 448", _AGAIN)
        if scales.ndim == 0 or scales.shape[1] == 1 or wide >= k:
            return stored, scales.reshape(-1, 1 if scales.ndim < 2 else scales.shape[1])[:, 0].expand(rows).contiguous()
        if rows % _GROUP[0] or tall % _GROUP[0] or wide % _GROUP[1]:
            return None
        return stored, scales[:: _GROUP[0], :: _GROUP[1]].contiguous()

    def _scales(self, name: str, stored: Tensor) -> Tensor:
        """Scales of a map `[rows, k]`, fp32, one for all, `[rows, 1]` or `[rows, k]`."""
        at = self._scale_of[name]
        scale = self.files.read(at)
        if not scale.dtype.is_floating_point or not bool((scale.float() > 0).all()):
            raise CheckpointError(f"{self.files.where(at)} holds values that are no scales", "numbers above 0", _AGAIN)
        scale, shape, (tall, wide) = scale.float(), tuple(scale.shape), self.scheme.block
        if scale.numel() == 1:
            return scale.reshape(())
        allowed = "one scale"
        if stored.ndim == 2:
            rows, k = stored.shape
            blocks = (-(-rows // tall), -(-k // wide))
            if shape in ((rows,), (rows, 1)):
                return scale.reshape(rows, 1)
            if shape == blocks:
                return scale.repeat_interleave(tall, 0).repeat_interleave(wide, 1)[:rows, :k]
            allowed = f"one scale, {rows}, or {list(blocks)} for blocks of {[tall, wide]}"
        what = f"{self.files.where(at)} has shape {list(shape)} beside a weight {list(stored.shape)}"
        raise CheckpointError(what, allowed, _AGAIN)


def _of_modelopt(method: Settings) -> Fp8Scheme | None:
    """ModelOpt's own description."""
    algorithm = method.values.get("quant_algo")
    return Fp8Scheme(f"{method.source}: quant_algo is {algorithm!r}") if algorithm in _MODELOPT else None


def _of_config(method: Settings) -> Fp8Scheme | None:
    """What config.json says of any of the three formats."""
    name = method.values.get("quant_method")
    if name == "modelopt" or (name is None and "quant_algo" in method):
        return _of_modelopt(method)
    said = f"{method.source} is {name!r}"
    if name == "fp8" and method.values.get("fmt") in (None, "e4m3"):
        block = _block(method.values.get("weight_block_size"))
        return None if block is None else Fp8Scheme(said, block)
    groups = method.values.get("config_groups")
    changed = any(method.values.get(key) for key in ("transform_config", "sparsity_config"))
    if name != "compressed-tensors" or changed or not isinstance(groups, dict) or not groups:
        return None
    blocks = {_of_group(group) for group in groups.values()}
    block = blocks.pop()
    return Fp8Scheme(said, block) if block is not None and not blocks else None


def _of_group(group: Any) -> tuple[int, int] | None:
    """The block of a group of compressed-tensors, the usual one where scales are not of blocks; None of other ways."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("strategy") not in ("tensor", "channel", "block"):
        return None
    is_plain = weights.get("symmetric", True) is True and not weights.get("actorder")
    if weights.get("num_bits") != 8 or weights.get("type") != "float" or not is_plain:
        return None
    return _block(weights.get("block_structure"))


def _block(value: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; the usual ones where nothing is said, None of what is no block."""
    if value is None:
        return _USUAL_BLOCK
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n <= 1 << 20 for n in value):
        return None
    return value[0], value[1]
