"""The doctor's forward pass gives the engine's own acceptance, step by step, for heads of every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_pairs import write_eagle_pair
from random_pairs import write_random_pair

from lab.doctor.draft.case import Case
from lab.doctor.draft.measure import gain_errors, is_certain_gain
from lab.pairs import shipped_pair
from lab.pairs.named import named_pair
from lab.pairs.prompts import prompts_for, prompts_from_ids, uneven_prompts

pytestmark = pytest.mark.reference


def case_of(target: Path, draft: Path, *, n: int = 6, k: int = 3, most: int = 90, new: int = 24) -> Case:
    prompts, _ = prompts_for(target, limit=n, max_tokens=most)
    return Case(target, draft, tuple(prompts), k=k, max_new_tokens=new, device="cpu")


def require_the_engines_steps(case: Case) -> None:
    """Every complete step of the walk is the engine's; another order of sums may turn one near tie in 100 steps."""
    counted = case.by_engine
    assert counted is not None
    engines = [response.req_metrics.steps for response in counted.responses]
    differ = walked = 0
    for engine, walk in zip(engines, case.base.steps, strict=True):
        taken = {(step.start, step.n_accepted) for step in engine if not step.cut}
        differ += len(taken ^ {(step.start, step.n_accepted) for step in walk if not step.cut})
        walked += len(walk)
    assert differ <= walked // 50  # a turned step is a difference on either side
    assert case.base.length == pytest.approx(counted.length.mean, rel=0.01)
    assert case.base.n_steps == pytest.approx(counted.n_steps, rel=0.01)


def test_the_walk_over_the_shipped_pair_is_what_its_engine_counts() -> None:
    pair = shipped_pair()
    case = case_of(pair.target, pair.draft, n=8, new=40)
    require_the_engines_steps(case)
    assert case.base.length > 2
    assert case.by_engine is not None
    given = case.by_engine.given_prefix
    assert case.base.self_fed == pytest.approx([share or 0.0 for share in given], abs=0.12)  # all roots, not steps


def test_the_walk_over_the_random_pair_is_what_its_engine_counts() -> None:
    """Another width than the target's, scaled RoPE, and a last tap that leaves the last layer."""
    pair = named_pair("random")
    ids = uneven_prompts(pair.target, 5, lengths=(64, 577, 1, 200, 23))
    case = Case(pair.target, pair.draft, tuple(prompts_from_ids(ids)), k=4, max_new_tokens=24, device="cpu")
    require_the_engines_steps(case)
    assert case.base.length > 1.2


@pytest.mark.parametrize("layout", ["safeailab", "speculators", "eagle"])
def test_the_walk_over_heads_of_other_layouts_is_what_their_engine_counts(tmp_path: Path, layout: str) -> None:
    if layout == "eagle":
        target, draft = write_eagle_pair(tmp_path, bias=True, qkv_bias=True, own_embedding=True)
    else:
        target, draft = write_random_pair(tmp_path, layout=layout, vocab=48, draft_vocab=32, taps=(0, 3, 8))
    case = case_of(target, draft, n=8)
    assert case.opened.method == ("eagle" if layout == "eagle" else "eagle3")
    require_the_engines_steps(case)


def test_a_gain_is_certain_where_it_is_large_and_steady_alone() -> None:
    pair = shipped_pair()
    case = case_of(pair.target, pair.draft, n=8, new=40)
    worse = case.measured(case.reading.with_variant(feeds_normed=True))
    assert is_certain_gain(worse, case.base)
    assert not is_certain_gain(case.base, worse)
    assert not is_certain_gain(case.base, case.base)
    assert gain_errors(case.base, case.base) == 0.0
    once = replace(case.base, accepted=case.base.accepted + (torch.arange(len(case.base.accepted)) == 7))
    assert gain_errors(case.base, once) < 2


def test_a_gpu_is_taken_unasked_for_a_target_of_many_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pair = shipped_pair()

    def device_of(asked: str) -> str:
        return Case(pair.target, pair.draft, device=asked).torch_device.type

    assert [device_of(asked) for asked in ("auto", "cpu", "cuda")] == ["cpu", "cpu", "cuda"]
    monkeypatch.setattr("lab.doctor.draft.case.FEW_PARAMETERS", 1000)
    assert [device_of(asked) for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
