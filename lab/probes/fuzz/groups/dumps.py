"""What other engines write: hidden states, safetensors or pickled, and reported acceptance."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from lab.acceptance.reported.files import read_acceptance
from lab.parity.dumped.files import read_dump
from lab.probes.fuzz.damage import damaged_bytes
from lab.probes.fuzz.group import Group
from lab.probes.fuzz.groups.pickles import PROGRAMS, TYPES
from lab.probes.fuzz.watch import CANARY

T, E, LAYERS = 6, 8, 3


def _forms() -> list[tuple[str, dict[str, Any]]]:
    """A file name's ending and its tensors, a form each."""
    ids, states = torch.arange(T), torch.randn(T, LAYERS, E, generator=torch.Generator().manual_seed(1)).bfloat16()
    side = states.flatten(1)
    return [
        (".safetensors", {"token_ids": ids, "hidden_states": states}),
        (".pt", {"input_ids": ids, "hidden_states": list(states.unbind(1)), "loss_mask": ids}),
        (".ckpt", {"input_ids": ids, "aux_hidden_state": side[None], "hidden_state": side[None, :, :E]}),
    ]


def _prepare_dumps(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    del folder
    return _forms()


def _make_dump(forms: list[tuple[str, dict[str, Any]]], random: Random, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    suffix, tensors = random.choice(forms)
    stored, path = dict(tensors), folder / f"dump{suffix}"
    name, kind = random.choice(list(stored)), random.randrange(5)
    if kind == 1:
        stored.pop(name)
    elif kind == 2 and isinstance(stored[name], torch.Tensor):
        shape = [random.choice((0, 1, 2, T, E, 3 * E)) for _ in range(random.randrange(5))]
        dtypes = (torch.int64, torch.float32, torch.bfloat16, torch.int32, torch.bool)
        stored[name] = torch.zeros(shape, dtype=random.choice(dtypes))
    elif kind == 3 and suffix != ".safetensors":
        value = stored[name] if isinstance(stored[name], torch.Tensor) else stored["input_ids"]
        stored[name] = random.choice((random.choice(TYPES)(value), random.choice(PROGRAMS)(folder.parent / CANARY)))
    elif kind == 4 and suffix != ".safetensors":
        path.write_bytes(pickle.dumps({name: random.choice(PROGRAMS)(folder.parent / CANARY)}))
        return
    if suffix == ".safetensors":
        save_file({key: tensor.contiguous() for key, tensor in stored.items()}, path)
    else:
        torch.save(stored, path)
    if kind == 0:
        path.write_bytes(damaged_bytes(path.read_bytes(), random))


def _open_dump(forms: object, folder: Path) -> None:
    [path] = folder.iterdir()
    dump = read_dump(path, E)
    assert all(len(state.values) >= len(dump.tokens) for state in dump.states), "a row a token"


REPORTED: tuple[Any, ...] = (
    {"spec_decode_acceptance_length": 2.5, "spec_decode_per_position_acceptance_rates": [0.8, 0.7],
     "spec_decode_num_drafts": 10},
    {"vllm:spec_decode_num_drafts": 10, "vllm:spec_decode_num_accepted_tokens": 15,
     "vllm:spec_decode_num_accepted_tokens_per_pos": [8, 7]},
    {"meta_info": {"spec_accept_histogram": [2, 1, 7], "spec_accept_token_num": 15, "spec_draft_token_num": 20}},
    {"choices": [{"meta_info": {"accept_lens": [1, 2, 3]}, "avg_decoded_tokens_per_iter": 2.5}]},
    {"specDecodingStats": {"numDraftTokens": 3, "numAcceptedTokens": 2, "numRequestsWithDraftTokens": 1}},
    {"decoding_stats": {"acceptance_length_percentiles": {"average": 2.5}}},
    ('vllm:spec_decode_num_drafts_total{engine="0"} 10\n'
    'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 8\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8\n'),
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None,
    -1,
    0,
    1e308,
    "text",
    [],
    {},
    [None],
    [[1]],
    {"average": "x"},
    True,
    10**15,
    [10**15],
    1.5,
)


def _make_report(prepared: object, random: Random, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = random.choice(REPORTED)
    text = document if isinstance(document, str) else json.dumps(_bent(document, random))
    data = text.encode()
    (folder / "report.json").write_bytes(damaged_bytes(data, random) if random.random() < 0.4 else data)


def _bent(value: Any, random: Random) -> Any:
    """A copy in which one value in a few is another."""
    if random.random() < 0.12:
        return random.choice(ODD)
    if isinstance(value, dict):
        return {key: _bent(part, random) for key, part in value.items() if random.random() > 0.05}
    return [_bent(part, random) for part in value] if isinstance(value, list) else value


def _open_report(prepared: object, folder: Path) -> None:
    for one in read_acceptance(folder / "report.json"):
        one.values()


GROUPS = (
    Group(
        "dumps", "another engine's hidden states, to inspect states", _prepare_dumps, _make_dump, _open_dump,
        ("ExperimentError",),
    ),
    Group(
        "reports", "acceptance that another engine reported, to import", lambda folder: None, _make_report,
        _open_report, ("ExperimentError",),
    ),
)  # fmt: skip
