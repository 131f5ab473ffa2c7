"""Models of transformers whose experts stay in MXFP4 and are decoded one at a time, for layers too large to decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


class DecodedOneByOne:
    """What an expert module indexes in the place of a map's parameter: `[rows, columns]` of one expert.

    Decoded by transformers' own code, in the dtype that the module's biases have by then.
    """

    def __init__(self, experts: Any, blocks: Tensor, scales: Tensor) -> None:
        self.experts, self.blocks, self.scales = experts, blocks, scales

    def __getitem__(self, expert: Tensor) -> Tensor:
        chosen = slice(int(expert), int(expert) + 1)
        stored = convert_moe_packed_tensors(self.blocks[chosen], self.scales[chosen])  # exact in bf16
        decoded: Tensor = stored[0].to(self.experts.down_proj_bias.dtype)
        return decoded


def load_model_of_stored_experts(directory: str | Path, dtype: torch.dtype, attention: str) -> Any:
    """As `lab.parity.hf_target.load_model`, of a gpt-oss in MXFP4; eager attention, whichever is asked for."""
    config = AutoConfig.from_pretrained(str(directory))
    weights = load_file(Path(directory) / "model.safetensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            prefix, experts = f"model.layers.{i}.mlp.experts.{name}", layer.mlp.experts
            delattr(experts, name)
            parts = (weights.pop(f"{prefix}_blocks"), weights.pop(f"{prefix}_scales"))
            setattr(experts, name, DecodedOneByOne(experts, *parts))
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    return model
