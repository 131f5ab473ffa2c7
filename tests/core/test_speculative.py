"""Trees in the draft settings: what they derive, what limits them, and TensorRT-LLM's names for them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import static_trees

from eagle3core import ConfigError, SpeculativeConfig, to_engine_spec_dict
from eagle3core.trees import StaticTree, most_dynamic_nodes

pytestmark = pytest.mark.reference


def spec(**changes: Any) -> SpeculativeConfig:
    """A valid draft configuration with `changes`."""
    return SpeculativeConfig(**{"model": "draft", **changes})


def tensorrt(**fields: Any) -> SpeculativeConfig:
    """The configuration of TensorRT-LLM's names."""
    return SpeculativeConfig.from_tensorrt_llm(fields, model="draft")


def refusal(build: Callable[[], object]) -> ConfigError:
    """The error of `build`, which must have its three parts."""
    with pytest.raises(ConfigError) as caught:
        build()
    error = caught.value
    assert str(error) == f"{error.what}\n  allowed: {error.allowed}\n  do: {error.remedy}"
    return error


def shape(config: SpeculativeConfig) -> tuple[str, int, int, int]:
    """What a step drafts: kind, nodes, depth, candidates."""
    return config.tree_kind, config.n_nodes, config.depth, config.top_k


def test_a_chain_is_what_nothing_about_trees_gives() -> None:
    assert shape(spec()) == ("chain", 4, 3, 1)
    assert shape(spec(num_speculative_tokens=1)) == ("chain", 2, 1, 1)
    assert spec().static_tree is None
    assert spec() == spec(num_speculative_tokens=3)
    assert repr(spec().num_speculative_tokens) == "3"


def test_the_published_choices_give_their_depth_their_nodes_and_their_limits() -> None:
    config = spec(choices="mc_sim_7b_63")
    assert shape(config) == ("static", 64, 4, 10)
    assert (config.num_speculative_tokens, config.path_len, config.decoding_tokens) == (4, 5, 64)
    assert config == spec(choices="mc_sim_7b_63", num_speculative_tokens=4)


@given(static_trees())
def test_any_tree_within_the_limits_is_taken_with_what_it_needs(tree: StaticTree) -> None:
    config = spec(choices=[list(path) for path in tree.paths], max_non_leaves_per_layer=16)
    assert config.static_tree == tree
    assert shape(config) == ("static", tree.n_nodes, tree.depth, tree.top_k)
    assert config.path_len == tree.depth + 1 <= config.decoding_tokens
    assert config.n_nodes <= config.decoding_tokens
    assert hash(config) == hash(dataclasses.replace(config))


def test_choices_are_read_once_and_kept_as_given(tmp_path: Path) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text("choices: [[0], [1]]", encoding="utf-8")
    config = spec(choices=path)
    path.unlink()
    assert config.choices == path
    assert shape(config) == ("static", 3, 1, 2)


def test_a_missing_file_is_a_chain_of_the_depth_that_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = spec(choices=str(tmp_path / "gone.yaml"), num_speculative_tokens=5)
    assert shape(config) == ("chain", 6, 5, 1)
    assert (config.path_len, config.decoding_tokens) == (6, 10)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("choices", [[], [[0], [1, 0]], 5, "tree", {"choices": [[0]]}])
def test_malformed_choices_are_an_error(choices: Any) -> None:
    refusal(lambda: spec(choices=choices))


def test_the_depth_of_choices_is_the_depth_asked_for() -> None:
    error = refusal(lambda: spec(choices="mc_sim_7b_63", num_speculative_tokens=3))
    assert error.what == "num_speculative_tokens is 3 with choices of depth 4"


def test_a_level_has_no_more_non_leaves_than_allowed() -> None:
    assert spec(choices="mc_sim_7b_63", max_non_leaves_per_layer=10).top_k == 10
    error = refusal(lambda: spec(choices="mc_sim_7b_63", max_non_leaves_per_layer=9))
    assert error.what.startswith("max_non_leaves_per_layer is 9 with choices whose levels have [1, 10, 10, 1]")


def test_a_tree_has_no_more_nodes_than_allowed() -> None:
    assert spec(choices="mc_sim_7b_63", max_decoding_tokens=64).n_nodes == 64
    error = refusal(lambda: spec(choices="mc_sim_7b_63", max_decoding_tokens=63))
    assert error.what == "max_decoding_tokens is 63 with choices of 64 nodes, root included"


def test_a_tree_is_no_deeper_than_its_path_limit() -> None:
    for tree in ({"choices": "mc_sim_7b_63"}, {"use_dynamic_tree": True, "num_speculative_tokens": 4}):
        error = refusal(lambda tree=tree: spec(**tree, max_path_len=4))
        assert error.what.startswith("num_speculative_tokens is 4 with max_path_len 4")


def test_a_dynamic_tree_has_60_nodes_or_what_its_levels_score() -> None:
    assert shape(spec(use_dynamic_tree=True, num_speculative_tokens=8)) == ("dynamic", 60, 8, 10)
    assert shape(spec(use_dynamic_tree=True)) == ("dynamic", 60, 3, 10)
    assert shape(spec(use_dynamic_tree=True, dynamic_tree_max_top_k=2)) == ("dynamic", 11, 3, 2)
    chain = spec(use_dynamic_tree=True, dynamic_tree_max_top_k=1, num_speculative_tokens=5)
    assert (shape(chain), chain.path_len) == (("dynamic", 6, 5, 1), 6)
    official = spec(use_dynamic_tree=True, dynamic_tree_max_top_k=4, num_speculative_tokens=5, max_decoding_tokens=26)
    assert shape(official) == ("dynamic", 26, 5, 4)


@given(st.integers(1, 10), st.integers(1, 8))
def test_a_dynamic_tree_takes_no_more_nodes_than_its_levels_score(k: int, depth: int) -> None:
    settings: dict[str, Any] = {
        "use_dynamic_tree": True, "dynamic_tree_max_top_k": k, "num_speculative_tokens": depth,
    }  # fmt: skip
    most = most_dynamic_nodes(k, depth)
    assert spec(**settings, max_decoding_tokens=most).n_nodes == most
    assert refusal(lambda: spec(**settings, max_decoding_tokens=most + 1)).allowed.startswith(f"at most {most}:")
    assert depth + 1 <= spec(**settings).n_nodes <= 60


def test_beams_are_no_wider_than_a_level_may_branch() -> None:
    wide: dict[str, Any] = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 12}
    error = refusal(lambda: spec(**wide))
    assert error.what == "max_non_leaves_per_layer is 10 with dynamic_tree_max_top_k 12"
    assert spec(**wide, max_non_leaves_per_layer=12).top_k == 12
    assert spec(**wide, num_speculative_tokens=1).n_nodes == 13, "of one level only the root has children"


@pytest.mark.parametrize("k", [0, 17, True, 2.0, None])
def test_a_node_has_1_to_16_candidates(k: Any) -> None:
    assert refusal(lambda: spec(dynamic_tree_max_top_k=k)).allowed == "an integer from 1 to 16"


def test_the_dynamic_flag_is_a_flag() -> None:
    wrong: Any = "yes"
    assert refusal(lambda: spec(use_dynamic_tree=wrong)).allowed == "True or False"


def test_a_fixed_and_a_dynamic_tree_are_never_both_asked_for() -> None:
    assert refusal(lambda: spec(choices="mc_sim_7b_63", use_dynamic_tree=True)).allowed == "one of the two"


def test_another_depth_never_turns_a_tree_into_a_chain() -> None:
    changes: dict[str, Any] = {"num_speculative_tokens": 2, "max_path_len": None, "max_decoding_tokens": None}
    refusal(lambda: dataclasses.replace(spec(choices="mc_sim_7b_63"), **changes))
    assert shape(dataclasses.replace(spec(use_dynamic_tree=True), **changes)) == ("dynamic", 60, 2, 10)
    assert shape(dataclasses.replace(spec(), **changes)) == ("chain", 3, 2, 1)


def test_the_engine_mapping_holds_the_tree_settings() -> None:
    mapping = to_engine_spec_dict(spec(choices=[[0], [1]]))
    assert (mapping["eagle_choices"], mapping["eagle_use_dynamic_tree"]) == (((0,), (1,)), False)


def test_tensorrt_llms_numbers_of_a_chain_are_its_depth() -> None:
    assert tensorrt(max_draft_len=5, num_eagle_layers=5) == spec(num_speculative_tokens=5)
    assert tensorrt(max_draft_len=3) == spec(num_speculative_tokens=3)


def test_tensorrt_llms_defaults_and_published_numbers_are_the_published_choices() -> None:
    published: dict[str, Any] = {"max_draft_len": 63, "num_eagle_layers": 4, "max_non_leaves_per_layer": 10}
    for config in (tensorrt(**published), tensorrt(), tensorrt(max_draft_len=63), tensorrt(eagle_choices=None)):
        assert config == spec(choices="mc_sim_7b_63", max_decoding_tokens=64)


def test_tensorrt_llms_limits_count_nodes_without_the_root() -> None:
    small: dict[str, Any] = {"eagle_choices": [[0], [1], [0, 0]], "num_eagle_layers": 2}
    assert shape(tensorrt(**small, max_draft_len=3)) == ("static", 4, 2, 2)
    assert "max_decoding_tokens is 3" in refusal(lambda: tensorrt(**small, max_draft_len=2)).what
    refusal(lambda: tensorrt(**{**small, "num_eagle_layers": 3}))


def test_tensorrt_llms_dynamic_tree_keeps_at_most_what_is_scored() -> None:
    dynamic: dict[str, Any] = {"eagle_use_dynamic_tree": True, "num_eagle_layers": 4}
    assert shape(tensorrt(**dynamic, max_draft_len=63)) == ("dynamic", 64, 4, 10)
    assert shape(tensorrt(**dynamic, max_draft_len=63, eagle_dynamic_tree_max_top_k=2)) == ("dynamic", 15, 4, 2)
    assert shape(tensorrt(**dynamic)) == ("dynamic", 60, 4, 10)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_draft_tokens": 3}, "the field 'max_draft_tokens' is unknown"),
        ({"max_draft_len": 0}, "max_draft_len is 0"),
        ({"num_eagle_layers": "4"}, "num_eagle_layers is '4'"),
        ({"max_batch_size": -1}, "max_batch_size is -1"),
        ({"eagle_use_dynamic_tree": 1}, "eagle_use_dynamic_tree is 1"),
        ({"eagle_use_dynamic_tree": True}, "without num_eagle_layers"),
        (
            {"eagle_use_dynamic_tree": True, "num_eagle_layers": 4, "eagle_dynamic_tree_max_top_k": 17},
            "eagle_dynamic_tree_max_top_k is 17",
        ),
        ({"eagle_dynamic_tree_max_top_k": 4}, "without eagle_use_dynamic_tree"),
        (
            {"eagle_use_dynamic_tree": True, "num_eagle_layers": 4, "eagle_choices": [[0]]},
            "choices are ((0,),) with use_dynamic_tree",
        ),
        ({"max_draft_len": 60, "num_eagle_layers": 4}, "max_decoding_tokens is 61 with choices of 64 nodes"),
        ({"num_eagle_layers": 3}, "num_speculative_tokens is 3 with choices of depth 4"),
    ],
)
def test_tensorrt_llms_unknown_names_and_contradictions_are_refused(fields: dict[str, Any], named: str) -> None:
    assert named in refusal(lambda: tensorrt(**fields)).what


def test_temperature_and_threshold_of_typical_acceptance_are_said_to_be_a_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert tensorrt(max_draft_len=3, temperature=0.7, eagle_posterior_threshold=0.09) == spec()
    assert "GenerationConfig(temperature=0.7, posterior_threshold=0.09)" in caplog.text


@pytest.mark.parametrize("fields", [{"temperature": 0.7}, {"eagle_posterior_threshold": 0.09}, {"temperature": 0}])
def test_without_both_acceptance_is_greedy(fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert tensorrt(max_draft_len=3, **fields) == spec()
    assert not caplog.records


@pytest.mark.parametrize("fields", [{"temperature": True}, {"temperature": float("nan")}, {"temperature": -1},
                                    {"temperature": 1, "eagle_posterior_threshold": 2}])  # fmt: skip
def test_no_temperature_and_no_threshold_are_refused(fields: dict[str, Any]) -> None:
    refusal(lambda: tensorrt(max_draft_len=3, **fields))


def test_greedy_acceptance_takes_any_threshold_and_the_batch_size_is_the_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert tensorrt(max_draft_len=3, temperature=0.0, eagle_posterior_threshold=0.09) == spec()
    assert not caplog.records
    assert tensorrt(max_draft_len=3, max_batch_size=16) == spec()
    assert "EngineConfig(max_batch_size=16)" in caplog.text


@pytest.mark.parametrize("method", ["eagle3", "draft_target", "ngram"])
def test_a_model_that_is_no_path_is_refused_even_where_it_has_no_truth_of_its_own(method: str) -> None:
    for model in (torch.zeros(2, 2), torch.zeros(2), object(), b"draft", 3):
        error = refusal(lambda model=model: spec(method=method, model=model))  # type: ignore[misc]
        assert "model" in error.what
