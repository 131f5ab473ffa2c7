"""Settings are refused before any model is read, each with its value, its range and a remedy."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest

from eagle3core import (
    ConfigError,
    EngineConfig,
    GenerationConfig,
    SpeculativeConfig,
    check_engine_spec_alignment,
    to_engine_spec_dict,
    validate_eagle_runtime_config,
)
from eagle3core.speculative import LEGACY_METHODS

pytestmark = pytest.mark.reference


def spec(**changes: Any) -> SpeculativeConfig:
    """A valid draft configuration with `changes`."""
    return SpeculativeConfig(**{"model": "draft", **changes})


def refusal(build: Callable[[], object]) -> ConfigError:
    """The error of `build`, which must have its three parts."""
    with pytest.raises(ConfigError) as caught:
        build()
    error = caught.value
    assert error.what
    assert str(error) == f"{error.what}\n  allowed: {error.allowed}\n  do: {error.remedy}"
    return error


@pytest.mark.parametrize(
    ("k", "path", "nodes"), [(1, 5, 5), (2, 5, 5), (3, 5, 6), (4, 5, 8), (5, 6, 10), (6, 7, 12), (8, 9, 16)]
)
def test_limits_left_out_follow_from_the_depth(k: int, path: int, nodes: int) -> None:
    config = spec(num_speculative_tokens=k)
    assert (config.path_len, config.decoding_tokens, config.max_non_leaves_per_layer) == (path, nodes, 10)


def test_decoding_tokens_left_out_follow_a_given_path_length() -> None:
    assert spec(num_speculative_tokens=2, max_path_len=9).decoding_tokens == 9


@pytest.mark.parametrize("method", LEGACY_METHODS)
def test_legacy_methods_are_named_as_not_built(method: str) -> None:
    error = refusal(lambda: spec(method=method))
    assert error.what == f"method is {method!r}, a legacy method that this engine does not build"
    assert "eagle3" in error.remedy


def test_an_unknown_method_is_refused() -> None:
    assert refusal(lambda: spec(method="medusa")).what == "method is 'medusa'"


@pytest.mark.parametrize("model", [None, ""])
def test_a_draft_directory_is_required(model: str | None) -> None:
    assert refusal(lambda: SpeculativeConfig(model=model)).what == f"model is {model!r} with method 'eagle3'"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_look_up_needs_no_model_and_drafts_a_chain(method: str) -> None:
    config = SpeculativeConfig(method=method, num_speculative_tokens=5)
    assert config.is_lookup
    assert (config.model, config.n_nodes, config.depth, config.tree_kind) == (None, 6, 5, "chain")
    assert not spec().is_lookup


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"model": "draft"}, "model 'draft'"),
        ({"choices": [[0], [1]]}, "choices ((0,), (1,))"),
        ({"use_dynamic_tree": True}, "use_dynamic_tree True"),
        (
            {"capture_layers": (1, 2), "capture_convention": "input"},
            "capture_layers (1, 2) and capture_convention 'input'",
        ),
    ],
)
def test_a_look_up_is_refused_what_belongs_to_a_draft_model(method: str, given: dict[str, Any], what: str) -> None:
    error = refusal(lambda: SpeculativeConfig(method=method, **given))
    assert error.what == f"method is {method!r} with {what}"
    assert error.allowed == "a chain of num_speculative_tokens, and no draft model"


@pytest.mark.parametrize("k", [0, 9, True])
def test_a_look_up_drafts_one_to_eight_tokens(k: Any) -> None:
    error = refusal(lambda: SpeculativeConfig(method="ngram", num_speculative_tokens=k))
    assert error.allowed == "an integer from 1 to 8"


@pytest.mark.parametrize("given", [{"method": "suffix"}, {"method": "draft_target", "model": "small"}])
def test_ranks_are_those_of_a_head_alone(given: dict[str, Any]) -> None:
    config = SpeculativeConfig(**given)
    error = refusal(lambda: EngineConfig(speculative_config=config, collect_draft_ranks=True))
    assert error.what == f"collect_draft_ranks is on with method {given['method']!r}"


def test_a_small_model_drafts_a_chain_and_needs_its_directory() -> None:
    config = SpeculativeConfig(method="draft_target", model="small", num_speculative_tokens=4)
    assert (config.n_nodes, config.tree_kind, config.is_lookup) == (5, "chain", False)
    error = refusal(lambda: SpeculativeConfig(method="draft_target"))
    assert error.what == "model is None with method 'draft_target'"
    error = refusal(lambda: SpeculativeConfig(method="draft_target", model="small", use_dynamic_tree=True))
    assert error.what == "method is 'draft_target' with use_dynamic_tree True"


@pytest.mark.parametrize("k", [0, -1, 9, 2.0, True, "3", None])
def test_the_depth_is_an_integer_from_1_to_8(k: Any) -> None:
    error = refusal(lambda: spec(num_speculative_tokens=k))
    assert error.what == f"num_speculative_tokens is {k!r}"
    assert error.allowed == "an integer from 1 to 8"


@pytest.mark.parametrize("name", ["max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer"])
@pytest.mark.parametrize("value", [0, -3, 1.5])
def test_structural_limits_are_positive_integers(name: str, value: Any) -> None:
    assert refusal(lambda: spec(**{name: value})).what == f"{name} is {value!r}"


def test_a_path_longer_than_the_tree_is_refused() -> None:
    error = refusal(lambda: spec(max_path_len=7, max_decoding_tokens=6))
    assert error.what == "max_path_len is 7 with max_decoding_tokens 6"


def test_limits_below_the_depth_and_its_root_are_refused() -> None:
    error = refusal(lambda: spec(num_speculative_tokens=4, max_path_len=4))
    assert "num_speculative_tokens + 1 = 5" in error.allowed
    assert spec(num_speculative_tokens=4, max_path_len=5, max_decoding_tokens=5).path_len == 5


@pytest.mark.parametrize("given", [{"capture_layers": (1, 2, 3)}, {"capture_convention": "input"}])
def test_tap_ids_and_their_convention_come_together(given: dict[str, Any]) -> None:
    assert "both, or neither" in refusal(lambda: spec(**given)).allowed


@pytest.mark.parametrize("layers", [(1, "2"), 5, "12", (1, -2), (True,)])
def test_tap_ids_are_layer_numbers(layers: Any) -> None:
    error = refusal(lambda: spec(capture_layers=layers, capture_convention="input"))
    assert error.what.startswith("capture_layers is ")


def test_an_unknown_tap_convention_is_refused() -> None:
    error = refusal(lambda: spec(capture_layers=[1, 2], capture_convention="middle"))
    assert error.allowed == "'input' or 'output'"


def test_a_list_of_tap_ids_becomes_a_tuple_so_that_equal_settings_compare_equal() -> None:
    listed = spec(capture_layers=[1, 2, 3], capture_convention="input")
    assert listed == spec(capture_layers=(1, 2, 3), capture_convention="input")
    assert hash(listed) == hash(spec(capture_layers=(1, 2, 3), capture_convention="input"))


@pytest.mark.parametrize("tp", [0, 2, "1", None])
def test_tensor_parallelism_is_refused_until_it_is_built(tp: Any) -> None:
    error = refusal(lambda: EngineConfig(tp=tp))
    assert error.what == f"tp is {tp!r}"
    assert "not built" in error.allowed


@pytest.mark.parametrize("name", ["session_len", "max_batch_size", "block_size", "prefill_chunk", "cache_blocks"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "8"])
def test_engine_sizes_are_positive_integers(name: str, value: Any) -> None:
    assert refusal(lambda: EngineConfig(**{name: value})).what == f"{name} is {value!r}"


def test_a_prefill_chunk_is_a_whole_number_of_blocks_and_the_remedy_names_one() -> None:
    error = refusal(lambda: EngineConfig(block_size=16, prefill_chunk=40))
    assert error.remedy == "set prefill_chunk=32"
    assert refusal(lambda: EngineConfig(block_size=16, prefill_chunk=8)).remedy == "set prefill_chunk=16"
    assert EngineConfig(block_size=16, prefill_chunk=32).prefill_chunk == 32


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan"), "half", None, True])
def test_the_cache_share_lies_above_0_and_up_to_1(share: Any) -> None:
    assert refusal(lambda: EngineConfig(cache_max_entry_count=share)).allowed == "a share in (0, 1]"


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan"), "half", None, True])
def test_the_share_of_reading_prompts_lies_above_0_and_up_to_1(share: Any) -> None:
    error = refusal(lambda: EngineConfig(prefill_share=share))
    assert (error.allowed, error.remedy) == ("a share in (0, 1]", "set prefill_share to 0.5")


@pytest.mark.parametrize("name", ["dtype", "device", "on_draft_failure"])
def test_choices_are_named_when_none_of_them_is_given(name: str) -> None:
    settings: dict[str, Any] = {name: "other"}
    error = refusal(lambda: EngineConfig(**settings))
    assert error.what == f"{name} is 'other'"
    assert error.allowed.startswith("one of (")


def test_a_session_shorter_than_one_step_is_refused() -> None:
    draft = spec(num_speculative_tokens=8)
    error = refusal(lambda: EngineConfig(session_len=15, speculative_config=draft))
    assert error.what == "session_len is 15 with max_decoding_tokens 16"
    assert EngineConfig(session_len=16, speculative_config=draft).session_len == 16


def test_a_speculative_configuration_is_one_of_ours() -> None:
    wrong: Any = {"model": "draft"}
    assert refusal(lambda: EngineConfig(speculative_config=wrong)).allowed == "a SpeculativeConfig or None"


def test_the_mode_follows_from_the_configuration_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TM_NUM_SPEC_TOKENS", "5")
    monkeypatch.setenv("EAGLE3_MODE", "off")
    assert EngineConfig().mode == "off"
    assert EngineConfig(speculative_config=spec(num_speculative_tokens=1)).mode == "single-token"
    assert EngineConfig(speculative_config=spec(num_speculative_tokens=2)).mode == "multi-token"


def test_no_request_can_switch_the_mode() -> None:
    """A request may use fewer drafts than the engine makes, which changes neither mode nor tokens (docs/engine.md)."""
    names = {field.name for field in dataclasses.fields(GenerationConfig)}
    draws = {"temperature", "top_k", "top_p", "min_p", "posterior_threshold", "seed"}
    assert names == {
        "max_new_tokens",
        "ignore_eos",
        "stop_token_ids",
        "stop_words",
        "logprobs",
        "max_draft_tokens",
        *draws,
    }


def test_adaptive_is_a_flag_and_keeps_no_ranks() -> None:
    assert refusal(lambda: SpeculativeConfig(model="draft", adaptive=1)).what == "adaptive is 1"  # type: ignore[arg-type]
    spec = SpeculativeConfig(model="draft", adaptive=True)
    error = refusal(lambda: EngineConfig(speculative_config=spec, collect_draft_ranks=True))
    assert error.what == "collect_draft_ranks is on with adaptive speculation"


def test_merging_needs_an_engine_configuration() -> None:
    assert refusal(lambda: validate_eagle_runtime_config(None, spec())).what == "engine_config is None"


def test_a_draft_configuration_reaches_the_engine_from_either_side() -> None:
    alone = validate_eagle_runtime_config(EngineConfig(session_len=99), spec())
    inside = validate_eagle_runtime_config(EngineConfig(session_len=99, speculative_config=spec()), None)
    both = validate_eagle_runtime_config(EngineConfig(session_len=99, speculative_config=spec()), spec())
    assert alone == inside == both
    assert (alone.session_len, alone.speculative_config) == (99, spec())


def test_two_different_draft_configurations_are_refused_by_the_differing_names() -> None:
    inner = EngineConfig(speculative_config=spec(num_speculative_tokens=2))
    error = refusal(lambda: validate_eagle_runtime_config(inner, spec(num_speculative_tokens=3)))
    assert error.what == ("two speculative configurations that differ in num_speculative_tokens, max_decoding_tokens")


def test_merging_checks_the_session_again() -> None:
    refusal(lambda: validate_eagle_runtime_config(EngineConfig(session_len=10), spec(num_speculative_tokens=8)))


def test_speculation_without_metrics_is_warned_about_and_plain_decoding_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    validate_eagle_runtime_config(EngineConfig(enable_metrics=False), None)
    assert not caplog.records
    validate_eagle_runtime_config(EngineConfig(enable_metrics=False), spec())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "enable_metrics is off" in caplog.text


def test_the_engine_mapping_holds_every_setting_once() -> None:
    mapping = to_engine_spec_dict(spec(num_speculative_tokens=2))
    assert len(mapping) == len(dataclasses.fields(SpeculativeConfig))
    assert (mapping["eagle_num_speculative_tokens"], mapping["eagle_debug"]) == (2, False)
    assert all(key.startswith("eagle_") for key in mapping)


def test_settings_out_of_step_are_each_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    config = spec()
    engine = to_engine_spec_dict(config)
    assert check_engine_spec_alignment(config, engine) == []
    assert not caplog.records
    del engine["eagle_model"]
    engine["eagle_max_path_len"] = 99
    assert check_engine_spec_alignment(config, engine) == [
        "eagle_model: missing",
        "eagle_max_path_len: configured 5, engine has 99",
    ]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
