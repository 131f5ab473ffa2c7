"""A draft that looks back a few positions only: the oracle's drafts under the same window, plain decoding's tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from device_engines import device_runner, write_nano_pair
from oracle import Draft, Target, speculate
from random_pairs import rewrite_config
from tiny_engines import Pair, engine_config, new_tokens, random_prompts, tiny_engine, tokens_of

from eagle3core import CheckpointError, ConfigError, Engine, Response, SpeculativeConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.step.replay import EagerReplayer
from eagle3core.step.tree import GrownTree

pytestmark = pytest.mark.reference

LENGTHS = [3, 19, 1, 30]
CHAIN_AS_TREE = [[0], [0, 0], [0, 0, 0]]
DYNAMIC = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 3, "max_decoding_tokens": 12}


def generated(pair: Pair, window: int | None, settings: dict[str, Any]) -> list[Response]:
    spec = SpeculativeConfig(model=str(pair[1]), draft_window=window, **settings)
    engine = Engine.from_pretrained(
        pair[0], engine_config(pair, None, speculative_config=spec, collect_draft_ranks=not spec.use_dynamic_tree)
    )
    return engine.generate(random_prompts(LENGTHS), new_tokens(14))


def counts_of(responses: list[Response]) -> list[int]:
    return [step.n_accepted for response in responses for step in response.req_metrics.steps]


@pytest.fixture(scope="module")
def baseline(pair: Pair) -> list[list[int]]:
    return tokens_of(tiny_engine(pair, None).generate(random_prompts(LENGTHS), new_tokens(14)))


def sliding(pair: Pair, directory: Path, **keys: Any) -> Pair:
    """The pair with a draft whose config has these keys."""
    draft = directory / "draft"
    shutil.copytree(pair[1], draft)
    rewrite_config(draft, **keys)
    return pair[0], draft


def test_every_draft_is_the_oracles_under_the_same_window(pair: Pair) -> None:
    responses, k, window = generated(pair, 6, {"num_speculative_tokens": 4}), 4, 6
    target = Target(pair[0])
    near, all_of_it = Draft(pair[1], target), Draft(pair[1], target)
    near.layer.window = window
    differs = False
    for prompt, response in zip(random_prompts(LENGTHS), responses, strict=True):
        expected = speculate(target, near, prompt, k=k, n_new=14)
        assert response.token_ids == expected.tokens
        ours = [(step.n_accepted, step.n_committed, list(step.ranks)) for step in response.req_metrics.steps]
        assert ours == [(step.n_accepted, len(step.tokens), step.ranks) for step in expected.steps]
        whole = speculate(target, all_of_it, prompt, k=k, n_new=14)
        differs |= [step.drafts for step in whole.steps] != [step.drafts for step in expected.steps]
    assert differs, "the window is short enough to show"


def test_trees_under_a_window_give_plain_decodings_tokens_and_draft_as_the_chain_does(
    pair: Pair, baseline: list[list[int]]
) -> None:
    chain = generated(pair, 5, {"num_speculative_tokens": 3})
    one_path = generated(pair, 5, {"choices": CHAIN_AS_TREE})
    dynamic = generated(pair, 5, DYNAMIC)
    assert tokens_of(chain) == tokens_of(one_path) == tokens_of(dynamic) == baseline
    assert counts_of(chain) == counts_of(one_path)


@pytest.mark.parametrize("settings", [{"num_speculative_tokens": 4}, DYNAMIC], ids=["chain", "dynamic"])
def test_a_window_longer_than_the_text_changes_nothing(pair: Pair, settings: dict[str, Any]) -> None:
    assert counts_of(generated(pair, 64, settings)) == counts_of(generated(pair, None, settings))


def test_a_head_of_sliding_layers_drafts_under_its_own_window(pair: Pair, tmp_path: Path) -> None:
    own = sliding(pair, tmp_path, layer_types=["sliding_attention"], sliding_window=6)
    expected = counts_of(generated(pair, 6, {"num_speculative_tokens": 4}))
    assert counts_of(generated(own, None, {"num_speculative_tokens": 4})) == expected
    assert counts_of(generated(own, 60, {"num_speculative_tokens": 4})) == expected, "the shorter of the two"
    with pytest.raises(ConfigError, match="sees 6 positions back, the tree has 6 levels"):
        generated(own, None, {"num_speculative_tokens": 6})


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"layer_types": ["full_attention"], "sliding_window": 6}, 0),
        ({"sliding_window": 6}, 0),
        ({"sliding_window": 6, "use_sliding_window": False}, 0),
        ({"sliding_window": 6, "use_sliding_window": True}, 6),
    ],
)
def test_a_window_counts_only_where_the_layers_have_one(
    pair: Pair, tmp_path: Path, keys: dict[str, Any], window: int
) -> None:
    own = sliding(pair, tmp_path, **keys)
    assert load_draft(own[1], load_target(own[0]).geometry).geometry.window == window


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "sliding_window is missing"),
        ({"layer_types": ["linear_attention"], "sliding_window": 6}, "layer_types is"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}, "layer_types is"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 1 << 22}, "sliding_window is 4194304"),
    ],
)
def test_layers_that_are_not_built_are_refused_by_their_key(
    pair: Pair, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    own = sliding(pair, tmp_path, **keys)
    with pytest.raises(CheckpointError, match=message):
        load_draft(own[1], load_target(own[0]).geometry)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "x", "draft_window": 3}, "draft_window is 3"),
        ({"model": "x", "draft_window": True}, "draft_window is True"),
        ({"model": "x", "draft_window": 1 << 22}, "draft_window is 4194304"),
        ({"model": "x", "method": "draft_target", "draft_window": 9}, "draft_window is 9 without a head"),
        ({"method": "ngram", "draft_window": 9}, "draft_window is 9 without a head"),
    ],
)
def test_a_window_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**settings)


def test_only_the_drafts_launches_of_attention_have_a_window(tmp_path: Path) -> None:
    """And of a tree's levels the window stands beside the number of earlier rows."""
    pair = write_nano_pair(tmp_path, seed=5, n_layers=1, taps=(0, 1), vocab=64)
    tree = GrownTree(2, 3, 6)
    windows: dict[bool, dict[str, set[int]]] = {}
    for is_near in (False, True):
        runner = device_runner(pair, None, EagerReplayer(), tree=tree, n_slots=1, draft_window=100 if is_near else 0)
        found = windows[is_near] = {"target": set(), "draft": set()}
        for stage in runner.programs[1]:
            for launch in stage.launches:
                if launch.variant.name.startswith(("attention_streams", "attention_rows")):
                    given = launch.operands
                    window = given["earlier"] >> 9 if "earlier" in given else given.get("window", 0)
                    found[stage.name.split(".")[0]].add(window)
    assert windows == {False: {"target": {0}, "draft": {0}}, True: {"target": {0}, "draft": {100}}}
