"""The target: a small Llama, trained on the corpus with Hugging Face's own modules, saved in their layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lab.pairs.layout import write_target
from lab.training.fit import Evaluate, StepLoss
from lab.training.sizes import PairSize
from lab.training.tokenizer import END_ID

ROPE_THETA = 10000.0
_TIED_HEAD = "lm_head.weight"
# Times 1/sqrt(hidden). The usual 0.02 is meant for hidden sizes in the thousands; at 64 it learnt far more slowly
# (validation loss after 45 s on one core, 0.02 against 0.08: 6.0 and 5.4).
_INITIAL_SPREAD = 0.7
_EVALUATION_TOKENS = 65536  # a batch of validation windows; bounds the memory of the logits


def build_target(size: PairSize, seed: int, device: torch.device) -> Any:
    """A freshly initialised `LlamaForCausalLM` with tied embeddings, in fp32.

    Args:
        size: its geometry.
        seed: of its weights; the caller's random state is left alone.
        device: where it goes.
    """
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.max_position,
        rms_norm_eps=1e-5,
        initializer_range=_INITIAL_SPREAD / size.hidden**0.5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.to(device)


def add_dropout(model: Any, rate: float) -> list[Any]:
    """Dropout on the embedding and on what each attention and MLP adds, while the model is in training mode.

    Returns:
        the hooks; remove them to have the plain model back.
    """
    layers = model.model.layers
    places = [model.model.embed_tokens, *(layer.self_attn for layer in layers), *(layer.mlp for layer in layers)]
    return [place.register_forward_hook(partial(_dropped, rate)) for place in places] if rate else []


def _dropped(rate: float, module: nn.Module, inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (F.dropout(output[0], rate, module.training), *output[1:])
    return F.dropout(output, rate, module.training)


def hidden_states(model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """Inputs of every layer, then the normed output: `layers + 1` tensors `[B, T, H]`.

    The entry of index i < layers is the residual stream before layer i: a tap in the "input" convention.
    """
    with mixed_precision(tokens.device):
        return tuple(model.model(tokens, use_cache=False, output_hidden_states=True).hidden_states)


def logits_of(model: Any, normed: Tensor) -> Tensor:
    """`[..., V]` fp32 logits of normed final states; the head runs outside mixed precision, so argmax has few ties."""
    with torch.autocast(normed.device.type, enabled=False):
        return F.linear(normed.float(), model.lm_head.weight.float())


def mixed_precision(device: torch.device) -> torch.autocast:
    """bf16 matrix products on CUDA, plain fp32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def windows(stream: Tensor, batch: int, length: int, random: torch.Generator) -> Tensor:
    """`[batch, length]` int64 tokens from random places of a stream `[N]`, on the stream's device."""
    starts = torch.randint(0, len(stream) - length + 1, (batch, 1), generator=random).to(stream.device)
    return stream[starts + torch.arange(length, device=stream.device)].long()


def target_loss(model: Any, stream: Tensor, size: PairSize) -> StepLoss:
    """Cross-entropy, in nats a token, of random windows of the training stream."""

    def loss(random: torch.Generator) -> Tensor:
        tokens = windows(stream, size.target.batch, size.target.window + 1, random)
        with mixed_precision(tokens.device):
            logits = model(tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def target_evaluation(model: Any, stream: Tensor, window: int) -> Evaluate:
    """Validation by `stream_loss` of the model as it stands."""
    return lambda: {"loss": stream_loss(model, stream, window)}


@torch.no_grad()
def stream_loss(model: Any, stream: Tensor, window: int) -> float:
    """Mean loss in nats over tokens 1..N-1 of a stream `[N]`, each predicted once.

    Windows overlap by one token, so every token but the first has at least its predecessor as context; on average
    half a window.
    """
    model.eval()
    total = 0.0
    for tokens in _covering(stream, window):
        hidden = hidden_states(model, tokens[:, :-1])[-1]
        losses = F.cross_entropy(logits_of(model, hidden).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        total += losses.double().sum().item()
    return total / (len(stream) - 1)


def _covering(stream: Tensor, window: int) -> list[Tensor]:
    n_whole = (len(stream) - 1) // window
    per_batch = max(1, _EVALUATION_TOKENS // window)
    starts = torch.arange(n_whole, device=stream.device)[:, None] * window
    index = starts + torch.arange(window + 1, device=stream.device)
    batches = [stream[part].long() for part in torch.split(index, per_batch)] if n_whole else []
    rest = stream[n_whole * window :].long()[None]
    return [*batches, rest] if rest.shape[1] > 1 else batches


def save_target(model: Any, directory: Path) -> None:
    """Weights in bf16 with their index, and a config with both spellings of the RoPE base and the dtype.

    Readers from before transformers 5 look only for `rope_theta` and `torch_dtype`, and fall back to base 10000 in
    silence.
    """
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    weights.pop(_TIED_HEAD)
    model.config.architectures = [type(model).__name__]
    config = {**model.config.to_diff_dict(), "dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_theta": ROPE_THETA}
    write_target(directory, config, weights)
    model.generation_config.save_pretrained(directory)


def load_target(directory: Path, device: torch.device) -> Any:
    """The saved target in fp32 (its weights are bf16 numbers), frozen, for teaching and measuring."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory, attn_implementation="sdpa")).float()
    weights = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    model.load_state_dict({**weights, _TIED_HEAD: weights["model.embed_tokens.weight"]})
    return model.to(device).eval().requires_grad_(False)
