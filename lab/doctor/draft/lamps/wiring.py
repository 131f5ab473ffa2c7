"""Whether the head is wired as it was trained: taps, norms, residual, vocabulary map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor

from lab.doctor.draft.alternatives import Alternative, judge, lamp_of, shortlist
from lab.doctor.draft.case import Case
from lab.doctor.draft.lamp import Finding, Lamp
from lab.doctor.draft.lamps.vocabulary import look_at_map

SHIFTS = (-1, 1, -2, 2)
OFF_BY_ONE = "all taps and each alone up to two layers off, the usual ids of both conventions, and every order"


def _taps_change(taps: tuple[int, ...]) -> str:
    if tuple(sorted(taps)) != taps:
        return f"reorder the columns of fc.weight: the head was trained with its taps in the order {list(taps)}"
    return f'SpeculativeConfig(capture_layers={taps}, capture_convention="input")'


def _with_taps(case: Case, taps: tuple[int, ...]) -> Alternative:
    words = f"taps at the inputs of layers {list(taps)}"
    return Alternative(words, _taps_change(taps), case.reading.with_taps(taps))


def tap_readings(case: Case) -> list[Alternative]:
    """Heads with other taps, as many as this one has."""
    geometry, target = case.reading.geometry, case.target_files.geometry
    own, n = geometry.taps, target.n_layers
    if case.reading.is_eagle1 or geometry.variant.reads_last or not own:
        return []
    lists = [tuple(tap + by for tap in own) for by in SHIFTS]
    lists += [(*own[:i], own[i] + by, *own[i + 1 :]) for i in range(len(own)) for by in SHIFTS]
    if len(own) == len(target.default_taps):
        lists += [tuple(tap + by for tap in target.default_taps) for by in (-1, 0, 1)]
    if len(own) <= 4:
        lists += list(permutations(own))
    known = dict.fromkeys(taps for taps in lists if taps != own and len(set(taps)) == len(own))
    return [_with_taps(case, taps) for taps in known if min(taps) >= 0 and max(taps) <= n]


def look_at_taps(case: Case) -> Finding:
    """First the usual mistakes; then, from the best of them, every tap over every layer near it."""
    usual = tap_readings(case)
    if not usual or not case.prompts:
        return judge(case, "tap_layers", OFF_BY_ONE, usual)
    best, n = shortlist(case, usual, 1)[0], case.target_files.geometry.n_layers
    if case.first_likelihood(best.reading) <= case.first_likelihood(case.reading):
        return judge(case, "tap_layers", OFF_BY_ONE, usual)
    for i in range(len(best.reading.geometry.taps)):
        taps = best.reading.geometry.taps
        moved = [(*taps[:i], tap, *taps[i + 1 :]) for tap in range(n + 1) if tap not in taps]
        best = shortlist(case, [best, *(_with_taps(case, each) for each in moved)], 1)[0]
    return judge(case, "tap_layers", OFF_BY_ONE, [best, *usual])


def last_tap_readings(case: Case) -> list[Alternative]:
    """The other side of the target's final norm, of heads that read the last layer's output."""
    reading, n = case.reading, case.target_files.geometry.n_layers
    reads_normed = reading.is_eagle1 or reading.geometry.variant.reads_last
    if not reads_normed and n not in reading.geometry.taps:
        return []
    side = "before" if reads_normed else "after"
    change = f"capture the last layer's output {side} the target's final norm"
    name = f"the last layer's output taken {side} the final norm"
    return [Alternative(name, change, replace(reading, normed_last=True))]


def _norm_weights(case: Case, names: Sequence[str], width: int) -> dict[str, Tensor]:
    """Stored gains; ones for those that are not there."""
    device = case.torch_device
    return {
        name: case.stored[name].float().to(device) if name in case.stored else torch.ones(width, device=device)
        for name in names
    }


def norm_readings(case: Case) -> list[Alternative]:
    """Norms before `fc`, and of the state fed back, that are there or not."""
    reading, variant = case.reading, case.reading.geometry.variant
    if reading.is_eagle1:
        return []
    others = [_feedback(case)]
    if variant.reads_last:
        return others
    n_taps, width = len(reading.geometry.taps), reading.geometry.target_hidden_size
    gains = _norm_weights(case, [f"fc_norm.{i}.weight" for i in range(n_taps)], width)
    gains |= _norm_weights(case, ["input_norm.weight"], n_taps * width)
    whole = replace(reading, weights={**gains, **reading.weights})
    names = {"none": "no norm before fc", "all": "one norm over all taps", "each": "a norm for each tap"}
    for kind, name in names.items():
        if kind == variant.fusion_norm:
            continue
        key = {
            "none": 'in config.json: "norm_before_fc": false, "fc_norm": false',
            "all": 'in config.json: "norm_before_fc": true',
            "each": 'in config.json: "fc_norm": true',
        }
        more = "" if kind == "none" or _has_norm(case, kind) else " (and restore its gains, which the file lacks)"
        others.append(Alternative(name, key[kind] + more, whole.with_variant(fusion_norm=kind)))
    return others


def _has_norm(case: Case, kind: str) -> bool:
    return ("input_norm.weight" if kind == "all" else "fc_norm.0.weight") in case.stored


def residual_readings(case: Case) -> list[Alternative]:
    """The layer's residual before or after the norm of its input, alone and with the feedback's norm."""
    reading, variant = case.reading, case.reading.geometry.variant
    if reading.is_eagle1 or not variant.has_hidden_norm:
        return []
    normed = not variant.normed_residual
    name = "the residual after the norm of the layer's input" if normed else "the residual before that norm"
    change = f'in config.json: "norm_before_residual": {str(normed).lower()}'
    feedback = _feedback(case)
    both = replace(
        feedback, name=f"{name}, and {feedback.name}",
        change=f"{change}, {feedback.change.removeprefix('in config.json: ')}",
        reading=feedback.reading.with_variant(normed_residual=normed),
    )  # fmt: skip
    return [Alternative(name, change, reading.with_variant(normed_residual=normed)), both]


def _feedback(case: Case) -> Alternative:
    """The state fed back on the other side of its norm."""
    feeds = not case.reading.geometry.variant.feeds_normed
    change = f'in config.json: "eagle_config": {{"return_hidden_post_norm": {str(feeds).lower()}}}'
    word = "the normed state fed back" if feeds else "the state fed back before its norm"
    return Alternative(word, change, case.reading.with_variant(feeds_normed=feeds))


WIRING: tuple[Lamp, ...] = (
    Lamp("tap_layers", "Are the taps those that the head was trained with?", look_at_taps),
    Lamp(
        "last_tap", "Is the last layer's output read on the right side of the final norm?",
        lamp_of("last_tap", "no tap is the last layer's output, or the other side of its norm", last_tap_readings),
    ),
    Lamp(
        "norms", "Are the norms before fc and of the fed-back state those of training?",
        lamp_of("norms", "each norm before fc, and the fed-back state on the other side of its norm", norm_readings),
    ),
    Lamp(
        "residual", "Is the layer's residual taken where it was trained?",
        lamp_of("residual", "the residual on the other side of the input's norm", residual_readings),
    ),
    Lamp("vocabulary_map", "Do the draft's ids mean the right target ids?", look_at_map, is_fast=True),
)  # fmt: skip
