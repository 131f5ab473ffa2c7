"""Whether the head sees positions and distances as it was trained to: rotary embedding, window, length."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle3core.geometry import RopeGeometry
from lab.doctor.draft.alternatives import (
    Alternative,
    engine_differs,
    first_difference,
    judge,
    shortlist,
    steps_apart,
)
from lab.doctor.draft.case import Case
from lab.doctor.draft.forward import all_choices
from lab.doctor.draft.lamp import Finding, Lamp, Repair
from lab.doctor.draft.measure import doubt, is_certain_gain

# Bases of published models, and scalings as their configs have them.
THETAS = (1e4, 2.5e4, 5e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 1e7)
FACTORS = (2.0, 4.0, 8.0, 32.0)
TRAINED = (64, 256, 1024, 4096, 8192, 32768)  # original contexts of scalings
FINER = (0.5, 0.7, 0.85, 1.18, 1.4, 2.0)  # of the best base or factor, twice
TABLES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WINDOWS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# What a fitted rotary setting must accept more than a usual one, and than the head as it is: of hundreds of settings
# some flatter a weak head by a few per cent.
LEAST_FITTED, LEAST_FITTED_GAIN = 0.01, 0.10
# A table that ends elsewhere: how far in front of the engine's first other step it may end, the steps of the search,
# and the share of the steps that differ which the nearest may leave.
FAR, NEAR, HALF = 48, 8, 0.5
LEAST_FALL, LEAST_ROWS = 0.25, 48  # of first-draft acceptance beyond a knee, and rows on either side of it


def rope_keys(rope: RopeGeometry, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that say so, in the spelling that the file has: all that must be there, or be null."""
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        scaling |= {} if rope.truncate else {"truncate": False}
        scaling |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "default":
        scaling = {"rope_type": "default"}
    if "rope_parameters" not in config:
        return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}
    stale = {"rope_scaling": None} if config.get("rope_scaling") else {}
    top = {"rope_theta": rope.theta} if config.get("rope_theta") is not None else {}
    return {**top, **stale, "rope_parameters": {"rope_theta": rope.theta, **scaling}}


def rope_change(rope: RopeGeometry, config: Mapping[str, Any]) -> str:
    """Those keys as they are typed."""
    return f"in config.json: {json.dumps(rope_keys(rope, config))[1:-1]}"


def _with_rope(case: Case, rope: RopeGeometry) -> Alternative:
    layer = case.config.get("transformer_layer_config") or case.config
    scaled = "no scaling" if rope.kind == "default" else f"{rope.kind} scaling by {rope.factor:g}"
    if rope.kind in ("llama3", "yarn"):
        scaled += f" from {rope.original_max_position}"
    return Alternative(
        f"the rotary base {rope.theta:g} and {scaled}", rope_change(rope, layer), case.reading.with_rope(rope)
    )


def look_at_rope(case: Case) -> Finding:
    """First bases, then scalings of the best of them, then both in finer steps."""
    asked = f"bases from {THETAS[0]:g} to {THETAS[-1]:g}, the target's, and linear, llama3 and yarn scalings"
    if not case.prompts:
        return judge(case, "rope", asked, [_with_rope(case, case.target_files.geometry.block.rope)])
    own, targets = case.reading.rope, case.target_files.geometry.block.rope
    bases = [replace(own, theta=theta) for theta in (*THETAS, targets.theta)]
    plain = [replace(own, kind="default", theta=theta) for theta in (own.theta, *THETAS, targets.theta)]
    usual = [rope for rope in dict.fromkeys([*bases, *plain, targets]) if rope != own]
    known = _best(case, usual)
    best = _best(case, [known, own, *_scaled(known), *_scaled(own), *_scaled(replace(own, theta=targets.theta))])
    for reach in (1.0, 0.4):
        steps = [1 + (step - 1) * reach for step in FINER]
        best = _best(case, [best, *(replace(best, theta=best.theta * step) for step in steps)])
        if best.kind != "default":
            best = _best(case, [best, *(replace(best, factor=max(1.0, best.factor * step)) for step in steps)])
    simple, finer = (case.measured(_with_rope(case, rope).reading) for rope in (known, best))
    # Of a usual setting and one that was fitted the usual one is meant, unless the other is better beyond doubt.
    is_better = finer.length > (1 + LEAST_FITTED) * simple.length and is_certain_gain(simple, finer)
    is_much = finer.length > (1 + LEAST_FITTED_GAIN) * case.base.length
    chosen = _with_rope(case, best if is_better and is_much and best != own else known)
    return judge(case, "rope", asked, [chosen], [_with_rope(case, rope) for rope in usual])


def _scaled(rope: RopeGeometry) -> list[RopeGeometry]:
    plain = RopeGeometry(theta=rope.theta)
    made = [replace(plain, kind="linear", factor=factor) for factor in FACTORS]
    for trained in TRAINED:
        made += [replace(plain, kind="llama3", factor=f, original_max_position=trained) for f in FACTORS]
        made += [replace(plain, kind="yarn", factor=f, original_max_position=trained) for f in FACTORS]
    return made


def _best(case: Case, ropes: Sequence[RopeGeometry]) -> RopeGeometry:
    """The one that makes the text likeliest; the first of equals."""
    return shortlist(case, [_with_rope(case, rope) for rope in dict.fromkeys(ropes)], 1)[0].reading.rope


def longest(case: Case) -> int:
    """Tokens of the longest text, its answer included."""
    text = case.text
    return max(len(p) + len(a) for p, a in zip(text.prompts, text.answers, strict=True))


def table_readings(case: Case) -> list[Alternative]:
    """Rotary tables that end before the longest text does."""
    if not case.prompts:
        return []
    stated = {int(c["max_position_embeddings"]) for c in (case.config, case.target_config) if _states(c)}
    ends = sorted(end for end in {*TABLES, *stated} if end < longest(case))
    return [_with_table(case, end) for end in ends]


def _states(config: dict[str, object]) -> bool:
    return isinstance(config.get("max_position_embeddings"), int)


def look_at_table(case: Case) -> Finding:
    """A table that ends early can only be the engine's doing: no file of a head holds one."""
    if not case.prompts:
        return Finding("rope_table", "unknown", "no prompts: where a table ends shows in what is accepted behind it")
    asked = f"tables that end before position {longest(case)}, the last that these prompts reach"
    finding = judge(case, "rope_table", asked, table_readings(case))
    if finding.colour == "red" or not engine_differs(case):
        return finding
    near = _nearest_table(case)
    return judge(case, "rope_table", asked, near) if near else finding


def _nearest_table(case: Case) -> list[Alternative]:
    """The table, of any length, whose steps are nearest to the engine's; none where no such table is near.

    The engine's first other step looks at most `k` positions beyond a table's end. From the ends in front of it the
    nearest is found in steps of `NEAR`, and from there one by one.
    """
    first = first_difference(case)
    if first is None:
        return []
    low, high = max(first - FAR, 1), first + case.k + 1
    best = min((_with_table(case, end) for end in range(high, low, -NEAR)), key=lambda each: _apart(case, each))
    if _apart(case, best) > HALF * _apart(case, None):
        return []
    end = best.reading.most_positions
    return [min((_with_table(case, n) for n in range(end - NEAR + 1, end + NEAR)), key=lambda each: _apart(case, each))]


def _apart(case: Case, other: Alternative | None) -> float:
    return steps_apart(case, case.base if other is None else case.measured(other.reading))


def _with_table(case: Case, end: int) -> Alternative:
    change = "make the rotary table as long as the session"
    return Alternative(f"a rotary table of {end} positions", change, replace(case.reading, most_positions=end))


def window_change(window: int) -> str:
    """The keys of config.json that say so."""
    kind = "sliding_attention" if window else "full_attention"
    return f'in config.json: "layer_types": ["{kind}"]' + (f', "sliding_window": {window}' if window else "")


def _with_window(case: Case, window: int) -> Alternative:
    name = f"a window of {window} positions" if window else "no window"
    return Alternative(name, window_change(window), case.reading.with_window(window))


def named_windows(case: Case) -> set[int]:
    """Windows that the head's files speak of, whether they ask for them or not; 0: none, which every file may mean."""
    places = (case.config, case.config.get("transformer_layer_config") or {})
    found = {place.get("sliding_window") for place in places}
    return {0, *(window for window in found if isinstance(window, int))}


def window_readings(case: Case) -> list[Alternative]:
    """The windows that the files name; of a head that has one in force, others as well."""
    own = case.reading.geometry.window
    windows = named_windows(case) | (set(WINDOWS) if own else set())
    return [_with_window(case, window) for window in sorted(windows - {own})]


def look_at_window(case: Case) -> Finding:
    """A window that is named and not in force, or in force and not meant."""
    named = ", ".join(str(window) for window in sorted(named_windows(case) - {0})) or "none"
    return judge(
        case, "sliding_window", f"no window, and those that config.json names ({named})", window_readings(case)
    )


def look_at_length(case: Case) -> Finding:
    """Where acceptance falls with the position for good, and whether a window would hold it up."""
    name = "collapse_length"
    if not case.prompts:
        return Finding(name, "unknown", "no prompts: a fall with length only shows on texts")
    agrees, positions = first_agreement(case)
    knee, before, beyond, errors = fitted_knee(agrees, positions)
    values = (("knee", knee), ("before_knee", before), ("beyond_knee", beyond))
    if not knee or errors < 4 or beyond > (1 - LEAST_FALL) * before:
        said = f"the first draft agrees alike at all positions up to {int(positions.max())}"
        return Finding(name, "green", said, values=values)
    fall = f"from position {knee} on the first draft agrees in {beyond:.0%} of places instead of {before:.0%}"
    windows = [knee * share // 4 for share in (1, 2, 3, 4)]
    tried = [_with_window(case, window) for window in windows if window and window != case.reading.geometry.window]
    best = max(tried, key=lambda each: case.measured(each.reading).length)
    after = case.measured(best.reading)
    if not is_certain_gain(case.base, after):
        if unsure := doubt(case.base, after, len(case.prompts)):
            gain = f"{best.name} would change {after.length - case.base.length:+.2f} tokens a step"
            return Finding(name, "unknown", f"{fall}; {gain}, but {unsure}", values=values)
        return Finding(name, "green", f"{fall}, and no window mends it: the text itself is harder there", values=values)
    repair = Repair(f"{best.change} (or train on longer texts)", case.before, after.length)
    return Finding(name, "red", f"{fall}; with {best.name} it holds", repair, weight=0.6, values=values)


def first_agreement(case: Case) -> tuple[Tensor, Tensor]:
    """Whether the first draft is the target's choice, `[R]` fp64, and the position of each row `[R]`, prompts' too."""
    chosen, positions = all_choices(case.reading, case.text)
    rows = torch.cat([torch.arange(first, end - 1) for first, _, end in case.text.spans()])
    agrees = chosen.cpu()[rows] == case.text.choices.cpu()[rows + 1]
    return agrees.double(), positions.cpu()[rows]


def fitted_knee(agrees: Tensor, positions: Tensor) -> tuple[int, float, float, float]:
    """The position that parts rows best into two levels: it, both means, and the fall in standard errors.

    0 as the position where there are too few rows on either side of any.
    """
    best = (0, math.nan, math.nan, 0.0)
    for knee in range(32, int(positions.max()), 16):
        low, high = agrees[positions < knee], agrees[positions >= knee]
        if min(len(low), len(high)) < LEAST_ROWS:
            continue
        error = math.sqrt(float(low.var()) / len(low) + float(high.var()) / len(high))
        errors = float(low.mean() - high.mean()) / error if error else 0.0
        if errors > best[3]:
            best = (knee, float(low.mean()), float(high.mean()), errors)
    return best


REACH: tuple[Lamp, ...] = (
    Lamp("rope", "Is the rotary embedding that of training?", look_at_rope, is_long=True),
    Lamp("rope_table", "Is the rotary table as long as the texts?", look_at_table),
    Lamp("collapse_length", "Does acceptance hold over the whole length?", look_at_length),
    Lamp("sliding_window", "Is the head's window the one of training?", look_at_window),
)
