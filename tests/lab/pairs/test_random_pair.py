"""The random pair: what it is there to show, and that the engine decodes it as the oracle does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Draft, Target, speculate
from random_pairs import rewrite_config
from rings import slow_but

from eagle3core import Engine, EngineConfig, GenerationConfig, Response, SpeculativeConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.step.kernel_limits import why_plain_torch
from lab.errors import ExperimentError
from lab.night.jobs import JobConfig, NightConfig, PairConfig
from lab.night.plan import pair_paths
from lab.pairs import Pair, shipped_pair
from lab.pairs.named import CACHE_VARIABLE, NAMES, named_pair
from lab.pairs.prompts import UNEVEN_LENGTHS, uneven_prompts
from lab.pairs.random_pair import make_random_pair
from lab.parity.inputs import chosen_pair

pytestmark = pytest.mark.reference

K = 8
SHORT = [64, 200, 23, 130]  # prompts of these lengths, four at a time, some past the positions where scaling begins


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_random_pair(tmp_path_factory.mktemp("random"))


def prompts_of(pair: Pair, lengths: Sequence[int]) -> list[list[int]]:
    by_length = dict(zip(UNEVEN_LENGTHS, uneven_prompts(pair.target), strict=True))
    return [by_length[length] for length in lengths]


def decode(pair: Pair, lengths: Sequence[int], *, dtype: str, n_new: int, **settings: Any) -> list[Response]:
    spec = SpeculativeConfig(model=str(pair.draft), num_speculative_tokens=K)
    config = EngineConfig(
        session_len=1024, max_batch_size=4, dtype=dtype, device="cpu", speculative_config=spec,
        collect_draft_ranks=True, **settings,
    )  # fmt: skip
    engine = Engine.from_pretrained(pair.target, config)
    return engine.generate(prompts_of(pair, lengths), GenerationConfig(max_new_tokens=n_new))


@pytest.fixture(scope="module")
def decoded(pair: Pair) -> list[Response]:
    return decode(pair, SHORT, dtype="float32", n_new=80)


def digest(pair: Pair) -> str:
    files = sorted(path for folder in (pair.target, pair.draft) for path in folder.iterdir())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_the_same_seed_gives_the_same_files_and_another_seed_others(pair: Pair, tmp_path: Path) -> None:
    again, other = make_random_pair(tmp_path / "again"), make_random_pair(tmp_path / "other", seed=1)
    assert digest(again) == digest(pair)
    assert digest(other) != digest(pair)


def test_it_has_what_the_shipped_pair_lacks_and_the_kernels_take_it(pair: Pair) -> None:
    target = load_target(pair.target).geometry
    draft = load_draft(pair.draft, target).geometry
    for rope in (target.block.rope, draft.block.rope):
        assert (rope.kind, rope.theta) == ("llama3", 500000.0)
        assert rope.original_max_position < max(UNEVEN_LENGTHS)
    assert target.block.rope != draft.block.rope, "taking the one for the other shows"
    assert draft.block.hidden_size != draft.target_hidden_size
    assert draft.has_embedding
    assert draft.draft_vocab_size < draft.vocab_size
    assert draft.taps != target.default_taps
    assert draft.taps[-1] == target.n_layers
    shipped = load_target(shipped_pair().target).geometry
    assert (shipped.block.rope.kind, shipped.block.rope.theta) == ("default", 10000.0)
    spec = SpeculativeConfig(model=str(pair.draft), num_speculative_tokens=K)
    assert why_plain_torch(target, draft, EngineConfig(speculative_config=spec), torch.bfloat16) is None


def test_drafts_are_right_often_and_wrong_often_at_every_level(decoded: list[Response]) -> None:
    steps = [step for response in decoded for step in response.req_metrics.steps if not step.cut]
    first = sum(step.n_accepted >= 1 for step in steps) / len(steps)
    assert 0.3 < first < 0.9
    for level in range(1, K):
        reached = [step for step in steps if step.n_accepted >= level]
        assert 0 < sum(step.n_accepted > level for step in reached) < len(reached), f"level {level}"
    missed = {step.ranks[step.n_accepted] for step in steps if step.ranks and step.n_accepted < K}
    assert -1 in missed, "some tokens lie outside the draft vocabulary"
    assert len(missed) > 10, "ranks that differ widely show what a wrong draft changes"


@pytest.mark.parametrize(
    ("half", "changes"),
    slow_but(
        [("draft", {"rope_scaling": None})],
        [("draft", {"rope_theta": 10000.0}), ("draft", {"rope_scaling": None}), ("target", {"rope_scaling": None})],
    ),
    ids=["the draft's base", "the draft's scaling", "the target's scaling"],
)
def test_a_rotation_read_wrongly_changes_the_drafts_ranks(
    tmp_path: Path, decoded: list[Response], half: str, changes: dict[str, Any]
) -> None:
    wrong = make_random_pair(tmp_path)
    rewrite_config(getattr(wrong, half), **changes)
    responses = decode(wrong, SHORT, dtype="float32", n_new=24)
    n_compared = n_changed = 0
    for right, response in zip(decoded, responses, strict=True):
        rights = {step.start: step.ranks for step in right.req_metrics.steps}
        n_same = next((i for i, (a, b) in enumerate(zip(right.token_ids, response.token_ids, strict=False)) if a != b),
                      len(response.token_ids))  # fmt: skip
        for step in response.req_metrics.steps:
            if step.start < n_same and step.start in rights and step.ranks and rights[step.start]:
                n_compared += 1
                n_changed += step.ranks[0] != rights[step.start][0]
    assert n_changed >= 0.05 * n_compared > 0, f"{n_changed} of {n_compared} first ranks"


@pytest.mark.slow
def test_the_engine_decodes_long_and_short_prompts_as_the_oracle_does(pair: Pair) -> None:
    lengths, n_new = [577, 64, 1, 200], 8  # two prefill chunks, a whole block, one token, four blocks
    responses = decode(pair, lengths, dtype="float64", n_new=n_new)
    target = Target(pair.target)
    draft = Draft(pair.draft, target)
    for prompt, response in zip(prompts_of(pair, lengths), responses, strict=True):
        expected = speculate(target, draft, prompt, k=K, n_new=n_new)
        assert response.token_ids == expected.tokens
        steps = response.req_metrics.steps
        assert [step.n_accepted for step in steps] == [step.n_accepted for step in expected.steps]
        assert [step.ranks for step in steps] == [tuple(step.ranks) for step in expected.steps]


def test_uneven_prompts_are_of_their_lengths_for_both_named_pairs(pair: Pair) -> None:
    for target in (pair.target, shipped_pair().target):
        prompts = uneven_prompts(target)
        assert tuple(map(len, prompts)) == UNEVEN_LENGTHS
        assert prompts == uneven_prompts(target)
        assert [len(prompt) for prompt in uneven_prompts(target, 10)][8:] == list(UNEVEN_LENGTHS[:2])
    with pytest.raises(ExperimentError, match="n_prompts is 0"):
        uneven_prompts(pair.target, 0)


def test_a_pair_is_found_by_name_and_made_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    found = named_pair("random")
    stamp = (found.draft / "config.json").stat().st_mtime_ns
    assert digest(found) == digest(pair)
    assert named_pair("random") == found
    assert (found.draft / "config.json").stat().st_mtime_ns == stamp
    assert len(list(tmp_path.iterdir())) == 1
    assert chosen_pair("random", "") == (found.target, found.draft)
    night = NightConfig(pair=PairConfig(name="random"), job=[JobConfig(notebook="10_parity_stages")])
    assert pair_paths(night) == {"target": found.target, "draft": found.draft}
    assert named_pair("shipped") == shipped_pair()
    assert chosen_pair("", "") == chosen_pair("shipped", "") == (shipped_pair().target, shipped_pair().draft)
    assert NAMES == ("shipped", "random")
    with pytest.raises(ExperimentError, match="no pair is called 'planted'"):
        named_pair("planted")
