"""How drafts are made: files of choices in both formats, and settings under our names and TensorRT-LLM's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

from eagle3core import Engine, EngineConfig, GenerationConfig, SpeculativeConfig
from eagle3core.loading import tree_of
from eagle3core.trees import StaticTree, read_choices
from lab.probes.fuzz.damage import as_bytes, damaged_bytes, damaged_text, damaged_value
from lab.probes.fuzz.doors import run_command
from lab.probes.fuzz.group import Ended, Group
from lab.probes.fuzz.pairs import SmallPair, prepare_pair

PUBLISHED = read_choices("mc_sim_7b_63")
assert PUBLISHED is not None, "it has a name, not a file"
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
TABLE = [[1, 2, 3], [4, 5], [6], [], [7]]
CHOICES: tuple[dict[str, Any], ...] = (
    {"choices": PATHS},
    {"choices": PATHS, "format": "paths"},
    {"choices": TABLE},
    {"choices": [[0, 1, 2], [0, 1], [0], [], [0]], "format": "adjacency"},
    {"choices": [list(path) for path in PUBLISHED.paths]},
)
NAMES = ("tree.json", "tree.yaml", "tree.yml")


def _prepare_choices(folder: Path) -> None:
    for i, name in enumerate(NAMES):
        place = folder / str(i)
        place.mkdir()
        (place / name).write_text(json.dumps(CHOICES[i]))
        assert _open_choices(None, place) == Ended(0, ""), "a valid file is taken"


def _make_choices(prepared: None, random: Random, folder: Path) -> None:
    name, value = random.choice(NAMES), random.choice(CHOICES)
    data = damaged_text(value, random)
    if name != "tree.json" and random.random() < 0.6:
        data = yaml.safe_dump(json.loads(as_bytes(_parsed(value, random)))).encode()  # in lines, as people write it
        data = damaged_bytes(data, random) if random.random() < 0.5 else data
    (folder / name).write_bytes(data)


def _open_choices(prepared: None, folder: Path) -> Ended:
    [path] = folder.iterdir()
    tree_of(SpeculativeConfig(model="draft", choices=str(path)))
    return run_command(["inspect", "tree", "--choices", str(path)])


def _parsed(value: Any, random: Random) -> Any:
    """A damaged value that Python reads as JSON: of the odd texts some are none."""
    while True:
        damaged = damaged_value(value, random)
        try:
            return json.loads(as_bytes(damaged))
        except (ValueError, RecursionError):
            continue


OURS: tuple[dict[str, Any], ...] = (
    {"method": "eagle3", "model": "draft", "num_speculative_tokens": 4, "max_path_len": 6, "max_decoding_tokens": 9,
     "capture_layers": [0, 1, 3], "capture_convention": "input", "eagle_debug": False, "eagle_metrics_debug": False},
    {"method": "eagle3", "model": "draft", "choices": PATHS, "max_non_leaves_per_layer": 3, "max_decoding_tokens": 12},
    {"model": "draft", "choices": "mc_sim_7b_63", "num_speculative_tokens": 4},
    {"model": "draft", "use_dynamic_tree": True, "num_speculative_tokens": 4, "dynamic_tree_max_top_k": 4,
     "max_decoding_tokens": 20, "max_non_leaves_per_layer": 6, "max_path_len": 5},
    {"method": "draft_target", "model": "small", "num_speculative_tokens": 3},
    {"method": "ngram", "num_speculative_tokens": 5, "max_decoding_tokens": 8},
    {"method": "suffix", "num_speculative_tokens": 2},
)  # fmt: skip
THEIRS: tuple[dict[str, Any], ...] = (
    {"max_draft_len": 7, "num_eagle_layers": 3, "max_non_leaves_per_layer": 10, "eagle_choices": PATHS,
     "temperature": 0.7, "eagle_posterior_threshold": 0.1},
    {"max_draft_len": 20, "num_eagle_layers": 4, "eagle_use_dynamic_tree": True, "eagle_dynamic_tree_max_top_k": 4,
     "max_batch_size": 2},
    {"max_draft_len": 3, "num_eagle_layers": 3},
    {"max_draft_len": 63, "eagle_choices": "mc_sim_7b_63"},
)  # fmt: skip
FIELDS = frozenset(field.name for field in fields(SpeculativeConfig))
# What Python can hold and JSON cannot, made when a case is opened.
_ODD: tuple[Callable[[], Any], ...] = (
    object, set, lambda: b"eagle3", lambda: (1, 2), lambda: 3 + 0j, lambda: torch.tensor(3), lambda: torch.zeros(2, 2),
    lambda: range(3), lambda: Path("draft"), lambda: int, lambda: StaticTree(((0,),)), lambda: iter([[0]]),
    lambda: {0: [0]}, lambda: True,
)  # fmt: skip


@dataclass(frozen=True)
class _Settings:
    """A case: fields, under whose names, and one of them that is replaced by an odd value."""

    is_ours: bool
    fields: dict[str, Any]
    odd: tuple[str, int] | None = None


def _make_settings(pair: SmallPair, random: Random, folder: Path) -> None:
    is_ours = random.random() < 0.7
    valid = random.choice(OURS if is_ours else THEIRS)
    damaged = _parsed(valid, random)
    odd = (random.choice(list(valid)), random.randrange(len(_ODD))) if random.random() < 0.2 else None
    if not isinstance(damaged, dict):
        damaged, odd = dict(valid), (random.choice(list(valid)), random.randrange(len(_ODD)))
    told = {"is_ours": is_ours, "fields": damaged, "odd": odd}
    (folder / "settings.json").write_bytes(as_bytes(told))


def _open_settings(pair: SmallPair, folder: Path) -> None:
    """Some tokens by an engine with the settings, where they are taken."""
    case = _Settings(**json.loads((folder / "settings.json").read_bytes()))
    given = dict(case.fields)
    if case.odd is not None:
        given[case.odd[0]] = _ODD[case.odd[1]]()
    models = {"draft": str(pair.draft), "small": str(pair.target)}
    if case.is_ours:
        given = {name: value for name, value in given.items() if name in FIELDS}  # others are Python's own error
        named = given.get("model")
        spec = SpeculativeConfig(**{**given, "model": models.get(named, named) if isinstance(named, str) else named})
    else:
        spec = SpeculativeConfig.from_tensorrt_llm(given, models["draft"])
    config = EngineConfig(
        session_len=128, max_batch_size=1, block_size=16, prefill_chunk=16, device="cpu", speculative_config=spec
    )
    engine = Engine.from_pretrained(pair.target, config)
    engine.generate([[1, 2, 3, 1, 2, 3, 1]], GenerationConfig(max_new_tokens=4))


def _prepare_settings(folder: Path) -> SmallPair:
    pair = prepare_pair(folder)
    for i, settings in enumerate((*OURS, *THEIRS)):
        place = folder / f"valid-{i}"
        place.mkdir()
        (place / "settings.json").write_text(json.dumps({"is_ours": i < len(OURS), "fields": settings}))
        _open_settings(pair, place)
    return pair


GROUPS = (
    Group(
        "choices",
        "files of choices, paths and adjacency tables, to the settings of drafts and to inspect tree",
        _prepare_choices,
        _make_choices,
        _open_choices,
    ),
    Group(
        "speculative-settings",
        "settings of every way of drafting, in our names and TensorRT-LLM's, to the engine",
        _prepare_settings,
        _make_settings,
        _open_settings,
    ),
)
