"""Rotary settings of a `config.json`, in the old spelling (`rope_theta`, `rope_scaling`) and in transformers 5's.

Source: the keys that transformers' configurations read and write; scalings after arXiv 2306.15595 (linear),
arXiv 2309.00071 (yarn, and dynamic in its section 2), arXiv 2402.13753 (longrope) and the Llama 3.1 release (llama3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.tensors import BUFFERS, NamedTensors
from eagle3core.errors import CheckpointError, shown
from eagle3core.geometry import BlockGeometry, RopeGeometry

DEFAULT_THETA = 10000.0  # what every Llama code base uses when the key is absent
KINDS = ("default", "linear", "dynamic", "llama3", "longrope", "yarn", "mrope")
# Older names: Phi-3's of longrope; and the one of sections for pictures, which turn as one where there is text alone.
_ALIASES = {"su": "longrope", "mrope": "default"}
SAME_FREQUENCIES, SMALLEST_FREQUENCY = 0.05, 1e-6  # relative and absolute: of a stored table, which may be in fp16
MOST_FACTORS = 4096  # of a longrope list: far more than pairs of any head


def read_rope(config: Settings, max_position: int) -> RopeGeometry:
    """Rotary parameters of a model, from its own config only.

    A draft never takes its target's base: published heads are trained at 10000 on targets of 500000.

    Args:
        max_position: positions of the model, the trained context of kinds that name none.

    Raises:
        CheckpointError: an unknown scaling, a missing factor, partial rotation, or two spellings in one file that
            contradict.
    """
    scaling = _scaling(config)
    _refuse_partial(config, scaling)
    theta = _theta(config)
    if scaling is None:
        return RopeGeometry(theta=theta)
    kind = _kind(scaling)
    if kind not in KINDS:
        raise scaling.bad("rope_type", kind, f"one of {KINDS}", "use a checkpoint with one of these")
    trained = config.count(  # Phi's place, which transformers reads first
        "original_max_position_embeddings", scaling.count("original_max_position_embeddings", max_position)
    )
    if kind == "linear":
        return RopeGeometry(theta=theta, kind="linear", factor=scaling.number("factor"))
    if kind == "dynamic":
        return RopeGeometry(
            theta=theta,
            kind="dynamic",
            factor=scaling.number("factor"),
            original_max_position=max_position,
        )
    if kind == "llama3":
        return RopeGeometry(
            theta=theta,
            kind="llama3",
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position=trained,
        )
    if kind == "longrope":
        return _longrope(scaling, theta, trained, max_position)
    if kind == "yarn":
        return _yarn(scaling, theta, trained, max_position)
    return RopeGeometry(theta=theta)


def check_pairs(config: Settings, rope: RopeGeometry, head_dim: int) -> None:
    """Refuse rotary settings that do not fit the head size.

    Raises:
        CheckpointError: a head too small for the kind, or lists of factors that are not one a pair.
    """
    if rope.kind == "dynamic" and head_dim < 4:  # its base is a power of head_dim / (head_dim - 2)
        raise config.bad("head_dim", head_dim, "at least 4 with a scaling of kind dynamic")
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != head_dim // 2:
            raise CheckpointError(
                f"{config.source}: {name} is a list of {len(factors)}",
                f"{head_dim // 2} numbers, one a pair of the {head_dim} values of a head",
                "correct it, or download it again",
            )


def require_stored_frequencies(files: NamedTensors, block: BlockGeometry) -> None:
    """Refuse a head that an old export wrote with other frequencies than its config's base gives: those of training.

    Only of a base without scaling, whose frequencies every writer stores alike.

    Raises:
        CheckpointError: the tensor, and the base that it stands for.
    """
    rope, head_dim = block.rope, block.head_dim
    for name in files.names if rope.kind == "default" else ():
        if not name.endswith(BUFFERS) or files.shape(name) != (head_dim // 2,):
            continue
        stored = files.read(name).double()
        share = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        if not torch.allclose(stored, rope.theta**-share, rtol=SAME_FREQUENCIES, atol=SMALLEST_FREQUENCY):
            base = float(stored[1].clamp_min(1e-30) ** (-1 / share[1])) if head_dim > 2 else 1.0
            raise CheckpointError(
                f"{files.where(name)} holds the frequencies of base {base:.2g}, but rope_theta is {rope.theta:g}",
                "the frequencies that the config's rope_theta gives, or no such tensor",
                f"set rope_theta in {files.described_in} to the base of training",
            )


def llama3_factors(rope: RopeGeometry, head_dim: int) -> Tensor:
    """`[head_dim / 2]` fp32 what a plain frequency is divided by in Llama 3's scaling, as GGUF files store it."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return frequencies / llama3_frequencies(frequencies, rope)


def llama3_frequencies(frequencies: Tensor, rope: RopeGeometry) -> Tensor:
    """Plain frequencies as Llama 3 stretches them, by their wavelength."""
    wavelength = 2 * math.pi / frequencies
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(wavelength > longest, frequencies / rope.factor, blended)
    return torch.where(wavelength < shortest, frequencies, stretched)


def _kind(scaling: Settings) -> str:
    """The kind, under its key or its older one.

    Raises:
        CheckpointError: both, that contradict: transformers takes the first, vLLM refuses them.
    """
    kinds = [name for name in (scaling.text("rope_type"), scaling.text("type")) if name]
    if len({_ALIASES.get(name, name) for name in kinds}) > 1:
        raise scaling.bad("type", kinds[1], f"rope_type, {kinds[0]!r}", "remove the wrong one")
    kind = kinds[0] if kinds else "default"
    return _ALIASES.get(kind, kind)


def _yarn(scaling: Settings, theta: float, trained: int, max_position: int) -> RopeGeometry:
    factor = scaling.number("factor", max_position / trained)
    return RopeGeometry(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=trained,
        beta_fast=_number_or_zero(scaling, "beta_fast") or 32.0,
        beta_slow=_number_or_zero(scaling, "beta_slow") or 1.0,
        attention_factor=_attention_factor(scaling, factor),
        truncate=scaling.flag("truncate", True),
    )


def _longrope(scaling: Settings, theta: float, trained: int, max_position: int) -> RopeGeometry:
    factor = scaling.number("factor", max_position / trained)
    usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0
    return RopeGeometry(
        theta=theta,
        kind="longrope",
        factor=factor,
        original_max_position=trained,
        attention_factor=scaling.number("attention_factor", usual),
        short_factors=_factors(scaling, "short_factor"),
        long_factors=_factors(scaling, "long_factor"),
    )


def _factors(scaling: Settings, key: str) -> tuple[float, ...]:
    listed = scaling.values.get(key)
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_FACTORS:
        raise scaling.bad(key, listed, "a list of numbers, one a rotated pair")
    return tuple(Settings({key: value}, scaling.source).number(key) for value in listed)


def _theta(config: Settings) -> float:
    """The base, which may be written at the top, in `rope_parameters`, in `rope_scaling`, or in several of them."""
    places = [config, config.nested("rope_parameters"), config.nested("rope_scaling")]
    found = {
        place.source: place.number("rope_theta") for place in places if place is not None and "rope_theta" in place
    }
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"rope_theta differs within one file: {found}",
            "one value, however often it is written",
            "remove the wrong one from config.json",
        )
    return next(iter(found.values()), DEFAULT_THETA)


def _scaling(config: Settings) -> Settings | None:
    """The object that names the scaling; both spellings may be present if they agree."""
    new, old = config.nested("rope_parameters"), config.nested("rope_scaling")
    if new is None or old is None:
        return new or old
    if _plain(new) != _plain(old):
        raise CheckpointError(
            f"{config.source}: rope_parameters {shown(new.values)} contradicts rope_scaling {shown(old.values)}",
            "one of them, or two that say the same",
            "remove the wrong one from config.json",
        )
    return new


def _plain(scaling: Settings) -> dict[str, object]:
    values = {key: value for key, value in scaling.values.items() if value is not None and key != "rope_theta"}
    values["rope_type"] = values.pop("rope_type", None) or values.pop("type", "default")
    values.pop("type", None)
    return values


def _refuse_partial(config: Settings, scaling: Settings | None) -> None:
    """Llama's layer has no partial rotation: readers of a file that asks for it turn different values of a head."""
    for place in (scaling, config):
        if place is not None and place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.bad(
                "partial_rotary_factor",
                place.values["partial_rotary_factor"],
                "1: partial rotation is not built, and readers disagree (vLLM rotates that share of a head in these "
                "families, transformers all of it)",
                "set it to 1 if the model was trained with whole heads rotated; otherwise use another checkpoint",
            )


def _number_or_zero(scaling: Settings, key: str) -> float:
    """A number that may be 0 or absent, which mean the same: not given."""
    return 0.0 if scaling.values.get(key) in (0, 0.0, None) else scaling.number(key)


def _attention_factor(scaling: Settings, factor: float) -> float | None:
    """Multiplier of cos and sin; None leaves the usual 0.1 * ln(factor) + 1 to the model."""
    if "attention_factor" in scaling:
        return scaling.number("attention_factor")
    scale, over_all = _number_or_zero(scaling, "mscale"), _number_or_zero(scaling, "mscale_all_dim")
    if scale and over_all:
        stretch = math.log(max(factor, 1.0))
        return (0.1 * scale * stretch + 1.0) / (0.1 * over_all * stretch + 1.0)
    return None
