"""The Python face: what a caller hands over is looked at before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import Pair, engine_config, tiny_engine, write_tiny_pair

from eagle3core import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    Engine,
    EngineConfig,
    GenerationConfig,
    Pipeline,
    SpeculativeConfig,
    pipeline,
)
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.checkpoint.tensors import TensorFiles

pytestmark = pytest.mark.reference

HUGE: Any = 10**5000
DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair that nothing is to be read of."""
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("dtype is 'float32'", {"dtype": "float32"}),
        ("dtype is torch.int8", {"dtype": torch.int8}),
        ("dtype is 3", {"dtype": 3}),
        ("device is 'gpu'", {"device": "gpu"}),
        ("device is 'meta'", {"device": "meta"}),
        ("device is 1.5", {"device": 1.5}),
        ("device is None", {"device": None}),
    ],
)
def test_a_wrong_dtype_or_device_is_refused_before_a_file_is_opened(
    tiny: Pair, named: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = load_target(tiny[0]).geometry
    monkeypatch.setattr(TensorFiles, "__init__", lambda *given: pytest.fail("a file was opened"))
    for load in (load_target, lambda path, **more: load_draft(path, geometry, **more)):
        with pytest.raises(ConfigError, match=named):
            load(tiny[0], **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(tiny: Pair) -> None:
    with pytest.raises(BackendUnavailable, match="device is 'cuda' and torch sees 0 CUDA devices"):
        load_target(tiny[0], device="cuda")


@pytest.mark.parametrize("path", [None, 3, "", "a\0b", b"target", ["target"], DEEP])
def test_what_is_no_path_is_refused(path: Any, tiny: Pair) -> None:
    doors: list[Callable[[], object]] = [
        lambda: pipeline(path),
        lambda: load_target(path),
        lambda: Engine.from_pretrained(path, EngineConfig()),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match="a directory, as text or Path"):
            door()


@pytest.mark.parametrize(
    "call",
    [
        lambda tiny: pipeline(tiny[0], engine_config={"tp": 1}),
        lambda tiny: pipeline(tiny[0], speculative_config=str(tiny[1])),
        lambda tiny: Engine.from_pretrained(tiny[0], None),
        lambda tiny: load_draft(tiny[1], tiny[0]),
        lambda tiny: load_draft(
            tiny[1], load_target(tiny[0]).geometry, capture_layers=("1",), capture_convention="input"
        ),
        lambda tiny: load_draft(tiny[1], load_target(tiny[0]).geometry, capture_layers=3),
        lambda tiny: EngineConfig(session_len=HUGE),
        lambda tiny: EngineConfig(dtype=DEEP),
        lambda tiny: EngineConfig(enable_metrics="yes"),
        lambda tiny: EngineConfig(cache_max_entry_count=DEEP),
        lambda tiny: SpeculativeConfig(model=3),
        lambda tiny: SpeculativeConfig(model="a", num_speculative_tokens=HUGE),
        lambda tiny: GenerationConfig(max_new_tokens=HUGE),
        lambda tiny: GenerationConfig(ignore_eos=1),
        lambda tiny: GenerationConfig(stop_words=HUGE),
        lambda tiny: GenerationConfig(stop_token_ids=(HUGE,)),
        lambda tiny: tiny_engine(tiny, None).generate(None, GenerationConfig()),
        lambda tiny: tiny_engine(tiny, None).generate([1, 2], GenerationConfig()),
        lambda tiny: tiny_engine(tiny, None).generate([[1]], None),
        lambda tiny: tiny_engine(tiny, None).generate([[1]], [None]),
        lambda tiny: tiny_engine(tiny, None).generate([[HUGE]], GenerationConfig()),
        lambda tiny: Pipeline(tiny_engine(tiny, None), None)(None),
        lambda tiny: Pipeline(tiny_engine(tiny, None), None)({"role": "user"}),
        lambda tiny: Pipeline(tiny_engine(tiny, None), None)([3]),
        lambda tiny: Pipeline(tiny_engine(tiny, None), None)("a", {"max_new_tokens": 3}),
    ],
)
def test_a_wrong_argument_is_refused_in_three_parts(tiny: Pair, call: Callable[[Pair], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        call(tiny)
    assert all((caught.value.what, caught.value.allowed, caught.value.remedy))
    assert len(str(caught.value)) < 2000


def test_a_target_as_a_path_is_as_good_as_one_as_text(tiny: Pair) -> None:
    config = engine_config(tiny, None)
    assert Engine.from_pretrained(Path(tiny[0]), config).target.geometry == load_target(str(tiny[0])).geometry


def test_a_directory_whose_name_no_system_could_have_is_refused_as_one_that_is_not_there(tiny: Pair) -> None:
    name = "a" * 5000
    geometry = load_target(tiny[0]).geometry
    for load in (load_target, pipeline, lambda path: load_draft(path, geometry)):
        with pytest.raises(CheckpointError):
            load(name)
