"""What an engine launches is known from the shapes of its models: what is compiled ahead is all that it looks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device_engines import CPU, NANO, write_nano_pair
from eagle_pairs import write_eagle_pair
from tiny_engines import Pair, write_tiny_pair

from eagle3core import ConfigError, EngineConfig, KernelLimit, SpeculativeConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.kernels import Variant, cubins
from eagle3core.loading import launched_kernels, needed_kernels, read_models, reading
from eagle3core.weights import pack_checkpoints

pytestmark = pytest.mark.reference

ARCH = "sm_90a"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"num_speculative_tokens": 3},
    "chain in fp8": {"num_speculative_tokens": 3, "draft_weights": "fp8"},
    "adaptive": {"num_speculative_tokens": 3, "adaptive": True},
    "tree": {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 3, "max_decoding_tokens": 10},
    "look-ups": {"method": "ngram", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"))


def config_of(model: Path | None, spec: dict[str, Any], **changes: Any) -> EngineConfig:
    """Settings of an engine whose draft, where it has one, lies in `model`."""
    own = {} if spec.get("method") == "ngram" or model is None else {"model": str(model)}
    made = SpeculativeConfig(**own, **spec) if spec else None
    settings = {"session_len": 256, "max_batch_size": 4, "dtype": "bfloat16", "device": "cpu", **changes}
    return EngineConfig(**settings, speculative_config=made)


def names(variants: list[Variant]) -> set[str]:
    """Names by digest: what machine code is looked for by."""
    return {cubins.cubin_name(variant, ARCH) for variant in variants}


@pytest.mark.parametrize("how", SETTINGS)
def test_kernels_known_from_shapes_are_those_of_an_engine_over_the_weights(how: str, pair: Pair) -> None:
    spec = SETTINGS[how]
    config = config_of(pair[1], spec)
    target = load_target(pair[0], dtype=torch.bfloat16)
    has_draft = bool(spec) and "method" not in spec
    draft = load_draft(pair[1], target.geometry, dtype=torch.bfloat16) if has_draft else None
    weights = spec.get("draft_weights", "as_stored")
    packed = pack_checkpoints(target, draft, device=CPU, block=config.block_size, draft_weights=weights)
    launched = names(launched_kernels(*packed, config, ARCH))
    assert names(needed_kernels(pair[0], config, ARCH)) == launched
    assert len(launched) > 10


def test_heads_of_eagle_1_and_small_models_have_kernels_of_their_own(tmp_path: Path, pair: Pair) -> None:
    nano = {name: value for name, value in NANO.items() if name != "draft_vocab"}
    target, head = write_eagle_pair(tmp_path, **nano)
    config = config_of(head, {"method": "eagle", "num_speculative_tokens": 2})
    assert len(needed_kernels(target, config, ARCH)) > 10
    small = config_of(pair[0], {"method": "draft_target", "num_speculative_tokens": 2})
    plain = names(needed_kernels(pair[0], config_of(None, {}), ARCH))
    assert names(needed_kernels(pair[0], small, ARCH)) - plain


def test_kernels_are_under_way_as_soon_as_models_are_known_where_kernels_will_run_and_nowhere_else(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cubins.CACHE_VARIABLE, str(tmp_path))
    config = config_of(pair[1], SETTINGS["chain"])
    on_a_cpu = read_models(pair[0], config)
    with on_a_cpu.compiling() as under_way:
        assert under_way.wait().n_wanted == 0
    monkeypatch.setattr(reading, "device_arch", lambda device: ARCH)  # there is no GPU here
    on_a_gpu = replace(on_a_cpu, backend=replace(on_a_cpu.backend, path="kernels"))
    with on_a_gpu.compiling() as under_way:
        assert under_way.n_missing == len(needed_kernels(pair[0], config, ARCH))


def test_models_that_no_kernel_takes_are_refused_with_the_reason(tmp_path: Path, pair: Pair) -> None:
    with pytest.raises(KernelLimit, match=r"no kernels run here: .*float32"):
        needed_kernels(pair[0], config_of(None, {}, dtype="float32"), ARCH)
    odd = write_tiny_pair(tmp_path)  # heads of eight
    with pytest.raises(KernelLimit, match="head"):
        needed_kernels(odd[0], config_of(None, {}), ARCH)
    with pytest.raises(ConfigError, match="target"):
        needed_kernels("", config_of(None, {}), ARCH)
