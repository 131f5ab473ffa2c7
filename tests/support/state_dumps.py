"""Hidden states as other engines dump them: small files in their shapes, computed by Hugging Face's model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.parity.hf_target import TargetReference


class Dumper:
    """A target in plain torch, and the files that are written of its states."""

    def __init__(self, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.reference = TargetReference(target, dtype=dtype, compute_dtype=dtype, device=torch.device("cpu"))
        self.n_layers, self.width = self.reference.n_layers, self.reference.hidden_size

    def states(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        """What every layer reads `[T, E]` by boundary; -1 is what the final norm gives."""
        seen = self.reference.run(tokens)
        boundaries = [seen["embed"], *(seen[f"{i}.mlp"] for i in range(self.n_layers))]
        return {**dict(enumerate(boundaries)), -1: seen["norm"]}

    def stacked(self, tokens: Sequence[int], boundaries: Sequence[int]) -> Tensor:
        """[T, L, E] of these boundaries."""
        states = self.states(tokens)
        return torch.stack([states[boundary] for boundary in boundaries], dim=1)


def write_vllm(path: Path, tokens: Sequence[int], states: Tensor) -> Path:
    """As vLLM's connector writes a request: ids, and states `[T, L, E]`."""
    save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(list(tokens))}, path)
    return path


def write_speculators(path: Path, tokens: Sequence[int], states: Tensor, *, as_list: bool = False) -> Path:
    """As speculators' data generation writes a sample: states side by side, or a list of layers."""
    ids = torch.tensor(list(tokens))
    kept = list(states.unbind(1)) if as_list else states.flatten(1)
    torch.save({"input_ids": ids, "hidden_states": kept, "loss_mask": torch.ones_like(ids)}, path)
    return path


def write_specforge(path: Path, tokens: Sequence[int], states: Tensor, last: Tensor) -> Path:
    """As SpecForge's prepare_hidden_states writes a sample: taps side by side, and the normed last state."""
    ids = torch.tensor(list(tokens))
    stored = {"input_ids": ids, "loss_mask": torch.ones_like(ids), "hidden_state": last[None].clone()}
    torch.save({**stored, "aux_hidden_state": states.flatten(1)[None].clone()}, path)
    return path
