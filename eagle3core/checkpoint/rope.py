"""Rotary settings of a `config.json`, in the old spelling (`rope_theta`, `rope_scaling`) and in transformers 5's.

Source: the keys that transformers' Llama configuration reads and writes; scalings after arXiv 2306.15595 (linear),
arXiv 2309.00071 (yarn) and the Llama 3.1 release (llama3).
"""

from __future__ import annotations

import math

from eagle3core.checkpoint.settings import Settings
from eagle3core.errors import CheckpointError
from eagle3core.geometry import RopeGeometry

DEFAULT_THETA = 10000.0  # what every Llama code base uses when the key is absent
KINDS = ("default", "linear", "llama3", "yarn", "mrope")


def read_rope(config: Settings, max_position: int) -> RopeGeometry:
    """Rotary parameters of a model, from its own config only.

    A draft never takes its target's base: published heads are trained at 10000 on targets of 500000.

    Raises:
        CheckpointError: an unknown scaling, a missing factor, or two spellings in one file that contradict.
    """
    scaling = _scaling(config)
    _refuse_partial(config)
    theta = _theta(config)
    if scaling is None:
        return RopeGeometry(theta=theta)
    _refuse_partial(scaling)
    kind = scaling.text("rope_type") or scaling.text("type", "default")
    trained = scaling.count("original_max_position_embeddings", max_position)
    if kind in ("default", "mrope"):  # of text all three rows of positions are equal, which is the plain rotation
        return RopeGeometry(theta=theta)
    if kind == "linear":
        return RopeGeometry(theta=theta, kind="linear", factor=scaling.number("factor"))
    if kind == "llama3":
        return RopeGeometry(
            theta=theta,
            kind="llama3",
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_max_position=trained,
        )
    if kind == "yarn":
        return RopeGeometry(
            theta=theta,
            kind="yarn",
            factor=scaling.number("factor"),
            original_max_position=trained,
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            attention_factor=_attention_factor(scaling),
            truncate=scaling.flag("truncate", True),
        )
    raise scaling.bad("rope_type", kind, f"one of {KINDS}", "use a checkpoint with one of these; others are not built")


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
            f"{config.source}: rope_parameters {new.values} and rope_scaling {old.values} contradict each other",
            "one of them, or two that say the same",
            "remove the wrong one from config.json",
        )
    return new


def _plain(scaling: Settings) -> dict[str, object]:
    values = {key: value for key, value in scaling.values.items() if value is not None and key != "rope_theta"}
    values["rope_type"] = values.pop("rope_type", None) or values.pop("type", "default")
    values.pop("type", None)
    return values


def _refuse_partial(place: Settings) -> None:
    if place.number("partial_rotary_factor", 1.0) != 1.0:
        raise place.bad(
            "partial_rotary_factor", place.values["partial_rotary_factor"], "1.0: partial rotation is not built"
        )


def _attention_factor(scaling: Settings) -> float | None:
    """Multiplier of cos and sin; None leaves the usual 0.1 * ln(factor) + 1 to the model."""
    if "attention_factor" in scaling:
        return scaling.number("attention_factor")
    if scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):  # a zero counts as left out
        stretch = math.log(max(scaling.number("factor"), 1.0))
        return (0.1 * scaling.number("mscale") * stretch + 1.0) / (
            0.1 * scaling.number("mscale_all_dim") * stretch + 1.0
        )
    return None
