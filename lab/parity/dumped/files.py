"""Dumps of hidden states on disk: token ids, and states of some layers for each of them.

Read are, by the tensors that a file holds:

* `token_ids` and `hidden_states` [T, L, E]: vLLM's `extract_hidden_states` connectors, and speculators' cached states.
* `input_ids` and `hidden_states` [T, L * E], [T, L, E] or a list of [T, E]: speculators' data generation, older form.
* `input_ids`, `aux_hidden_state` [1, T, L * E] and `hidden_state` [1, T, E]: SpecForge; the second one is normed.

None of them says which layers they are. Pickled files (`.pt`, `.ckpt`) are read as tensors, never run.
Source: vLLM 0.33, ExampleHiddenStatesConnector; speculators 0.9; SpecForge, prepare_hidden_states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3core.checkpoint import load_pickled
from eagle3core.errors import CheckpointError
from lab.errors import ExperimentError

FORMS = (
    "safetensors with token_ids and hidden_states (vLLM, speculators), or .safetensors, .pt or .ckpt with input_ids "
    "and hidden_states, or with aux_hidden_state and hidden_state (SpecForge)"
)
AGAIN = "dump the states again, and give the files as they were written"


@dataclass(frozen=True)
class State:
    """One layer's states.

    Attributes:
        name: the tensor and the place in it. values: [T, E]. is_normed: whether its form says that it is normed.
    """

    name: str
    values: Tensor
    is_normed: bool = False


@dataclass(frozen=True)
class Dump:
    """What was dumped of one request.

    Attributes:
        name: of the file. form: who writes such files. tokens: ids, one a row of the states.
    """

    name: str
    form: str
    tokens: tuple[int, ...]
    states: tuple[State, ...]

    @property
    def dtype(self) -> str:
        """Of what was computed: fp32 files whose every value is one of bf16 were widened when they were written."""
        values = [state.values for state in self.states]
        if all(one.dtype == torch.float32 and not bool((one.view(torch.int32) & 0xFFFF).any()) for one in values):
            return "bfloat16"
        return str(values[0].dtype).removeprefix("torch.")


def read_dump(path: Path, width: int) -> Dump:
    """The dump in a file.

    Args:
        width: E of the target.

    Raises:
        ExperimentError: another form, a damaged file, or shapes that do not fit the token ids and the target.
    """
    tensors = _tensors(path)
    form, ids_name, parts = _form(path, tensors)
    ids = tensors[ids_name].flatten()
    if ids.dtype not in (torch.int64, torch.int32) or not len(ids):
        raise _refused(path, f"{ids_name} is {list(ids.shape)} of {ids.dtype}", "token ids, at least one")
    states = [state for name in parts for state in _states(path, name, tensors[name], len(ids), width)]
    if form == "SpecForge":
        states = [State(one.name, one.values, one.name == "hidden_state") for one in states]
    kinds = {state.values.dtype for state in states}
    if len(kinds) > 1 or not states[0].values.dtype.is_floating_point:
        raise _refused(path, f"states of {sorted(map(str, kinds))}", "states of one floating-point dtype")
    rows = min(len(state.values) for state in states)  # the last token may have been sampled and never read
    return Dump(path.name, form, tuple(ids[:rows].tolist()), tuple(states))


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        if path.suffix in (".pt", ".ckpt"):
            return load_pickled(path, with_lists=True)
    except (OSError, SafetensorError) as error:
        raise _refused(path, f"cannot be read: {error}", FORMS) from error
    except CheckpointError as error:
        raise _refused(path, f"cannot be read: {error.what}", error.allowed) from error
    packed = "; unpack it first" if path.suffix in (".zst", ".gz") else ""
    raise ExperimentError(f"{path.name} ends in {path.suffix!r}", FORMS, AGAIN + packed)


def _form(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, str, list[str]]:
    """Who writes such a file, the name of its ids, and those of its states."""
    listed = sorted((name for name in tensors if name.startswith("hidden_states.")), key=_index)
    if "input_ids" in tensors and "aux_hidden_state" in tensors:
        last = ["hidden_state"] if "hidden_state" in tensors else []
        return "SpecForge", "input_ids", ["aux_hidden_state", *last]
    for form, ids in (("vLLM", "token_ids"), ("speculators", "input_ids")):
        if ids in tensors and ("hidden_states" in tensors or listed):
            return form, ids, ["hidden_states"] if "hidden_states" in tensors else listed
    raise _refused(path, f"holds {', '.join(sorted(map(repr, tensors))[:8]) or 'nothing'}", FORMS)


def _index(name: str) -> int:
    tail = name.rpartition(".")[2]
    return int(tail) if tail.isdigit() else 0


def _states(path: Path, name: str, tensor: Tensor, n_tokens: int, width: int) -> Iterator[State]:
    """States [T, E] of a tensor [T, L * E], [T, L, E] or [1, T, L * E]."""
    rows = tensor[0] if tensor.dim() == 3 and len(tensor) == 1 and tensor.shape[1] > 1 else tensor
    if rows.dim() == 3:
        rows = rows.flatten(1) if rows.shape[2] == width else rows.flatten(0)  # another width is refused below
    n_layers, rest = divmod(rows.shape[1], width) if rows.dim() == 2 else (0, 1)
    if rest or not n_layers or len(rows) not in (n_tokens, n_tokens - 1):
        allowed = f"[{n_tokens}, L, {width}], [{n_tokens}, L * {width}] or [1, {n_tokens}, L * {width}]"
        raise _refused(path, f"{name} is {list(tensor.shape)} beside {n_tokens} token ids", allowed)
    for layer, values in enumerate(torch.split(rows, width, dim=1)):
        yield State(name if n_layers == 1 else f"{name}[{layer}]", values.contiguous())


def _refused(path: Path, what: str, allowed: str) -> ExperimentError:
    return ExperimentError(f"{path.name}: {what}", allowed, AGAIN)
