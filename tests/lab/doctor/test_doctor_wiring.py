"""Planted causes of wiring and reach: the doctor names each first or second, with what mending it really gives."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from broken_heads import HEAD_CAUSES, Broken, Cause
from random_pairs import write_random_pair
from rings import exhaustive_but

from eagle3core.geometry import RopeGeometry
from lab.doctor.draft import examine as examining
from lab.doctor.draft.case import Case
from lab.doctor.draft.given import case_of
from lab.doctor.draft.lamps.reach import REACH, rope_keys
from lab.doctor.draft.lamps.wiring import WIRING
from lab.pairs import shipped_folder, shipped_pair
from lab.pairs.prompts import joined_prompts, prompts_from_ids
from lab.pairs.random_ids import random_prompts

pytestmark = [pytest.mark.reference, pytest.mark.slow]

OWN = (*WIRING, *REACH)
SLOW = ("norms: normed feedback that was not trained", "vocabulary_map: absolute ids")


def case_with(broken: Broken) -> Case:
    case, _ = case_of(str(broken.target), str(broken.draft), n_prompts=broken.n_prompts, device="cpu")
    if broken.prompt_tokens:
        ids = joined_prompts(broken.target, broken.n_prompts, broken.prompt_tokens)
        case = replace(case, prompts=tuple(prompts_from_ids(ids)))
    return replace(case, fault=broken.fault)


@cache
def healthy(target: Path, repaired: Path, n_prompts: int, prompt_tokens: int) -> Case:
    """The repaired pair, whose text every cause of these prompts shares."""
    return case_with(Broken(target, repaired, repaired, n_prompts=n_prompts, prompt_tokens=prompt_tokens))


def by_label(label: str) -> Cause:
    return next(cause for cause in HEAD_CAUSES if cause.label == label)


@pytest.mark.parametrize("label", exhaustive_but(SLOW, [cause.label for cause in HEAD_CAUSES]))
def test_a_planted_cause_is_named_with_what_mending_it_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    monkeypatch.setattr(examining, "LAMPS", OWN)
    cause = by_label(label)
    broken = cause.make(tmp_path)
    mended, case = healthy(broken.target, broken.repaired, broken.n_prompts, broken.prompt_tokens), case_with(broken)
    case.__dict__ |= {"text": mended.text, "plain": mended.plain}  # the target is the same, and so is what it says
    red = examining.examine(case).of("red")
    names = [each.lamp.name for each in red]
    assert cause.name in names[:2], [each.finding.said for each in red]
    repair = red[names.index(cause.name)].finding.repair
    assert repair is not None
    assert repair.change
    assert repair.before == case.before
    assert repair.after is not None
    if cause.name == "collapse_length":  # mended by a window, not by another file of this pair
        assert repair.after > 1.5 * case.before
    else:
        assert repair.after == pytest.approx(mended.before, rel=0.1)


def test_the_rotary_keys_that_are_to_be_typed_are_read_as_what_was_measured(tmp_path: Path) -> None:
    pair, folder = shipped_pair(), tmp_path / "draft"
    shutil.copytree(pair.draft, folder)
    wanted = RopeGeometry(theta=5e5, kind="llama3", factor=8.0, original_max_position=256)
    stated = json.loads((folder / "config.json").read_text())
    for spelling in (stated, {key: value for key, value in stated.items() if key != "rope_parameters"}):
        (folder / "config.json").write_text(json.dumps(spelling | rope_keys(wanted, spelling)))
        assert Case(pair.target, folder, device="cpu").reading.rope == wanted


@pytest.mark.parametrize("pair", ["shipped", pytest.param("qwen3", marks=pytest.mark.exhaustive)])
def test_no_lamp_of_wiring_or_reach_is_red_for_a_healthy_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str
) -> None:
    monkeypatch.setattr(examining, "LAMPS", OWN)
    if pair == "shipped":
        case = healthy(shipped_folder() / "target", shipped_folder() / "draft", 16, 0)
    else:
        target, draft = write_random_pair(tmp_path, family="qwen3", vocab=64, draft_vocab=48)
        ids = random_prompts(target, 12, 64).ids
        case = Case(target, draft, tuple(prompts_from_ids(ids)), max_new_tokens=48, device="cpu")
    assert examining.examine(case).of("red") == []
