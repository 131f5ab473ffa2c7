"""The independent witness: Llama, EAGLE-3 and greedy speculation in plain fp64, with no cache, written from the papers.

Every call reads the whole sequence anew, one sequence at a time, so there is nothing that could be kept wrongly: no
cache, no batch, no chunk, no rewind. Nothing of the engine or the lab is used, its readers of checkpoints included.
Sources: Llama as `transformers` defines it (RMSNorm, rotated halves, grouped queries); EAGLE-3, arXiv 2503.01840,
section 3, with the names of SafeAILab/EAGLE's checkpoints; greedy verification, arXiv 2211.17192.

    target = Target("pair/target")
    draft = Draft("pair/draft", target)
    decoded = speculate(target, draft, prompt, k=3, n_new=20)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Tokens = Sequence[int]


@dataclass(frozen=True)
class Chain:
    """What a draft proposes after a sequence.

    Attributes:
        tokens: the k drafted tokens, target ids.
        logits: `[k, Vd]` the draft's logits at each level; row i chose token i.
        states: `[k, Hd]` the layer's output at each level before the final norm, which the next level is fed.
    """

    tokens: list[int]
    logits: Tensor
    states: Tensor


@dataclass(frozen=True)
class Step:
    """One step of speculative decoding.

    Attributes:
        drafts: the k drafted tokens.
        n_accepted: drafts the target agrees with, whether or not a limit then cuts them.
        tokens: what is committed: the accepted drafts and the target's next token, up to a limit or stop token.
        ranks: place of the target's token in the draft's order (0 is its favourite, the lower id first among equals,
            -1 outside its vocabulary) at every committed level whose prefix was right.
    """

    drafts: list[int]
    n_accepted: int
    tokens: list[int]
    ranks: list[int]


@dataclass(frozen=True)
class Decoded:
    """A finished request: its new tokens, the first of which no draft proposed, and the steps that made the others."""

    tokens: list[int]
    steps: list[Step]


class Layer:
    """Attention and MLP of one Llama layer, of tensors whose names begin with `prefix`.

    How their inputs are normed and added up is the model's.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> None:
        assert config.get("hidden_act", "silu") == "silu", "only SiLU is written here"
        self.tensors, self.prefix = tensors, prefix
        self.window = 1 << 20  # positions back that a row sees, its own included
        self.n_heads = int(config["num_attention_heads"])
        self.n_groups = int(config.get("num_key_value_heads") or self.n_heads)
        self.head_dim = int(config.get("head_dim") or config["hidden_size"] // self.n_heads)
        self.frequencies = rotary_frequencies(config, self.head_dim)
        self.has_bias = {"self_attn": bool(config.get("attention_bias")), "mlp": bool(config.get("mlp_bias"))}

    def linear(self, part: str, x: Tensor) -> Tensor:
        """`x W^T + b` for one of the projections, e.g. "mlp.up_proj"; a bias only where the config has one."""
        y = x @ self.tensors[f"{self.prefix}{part}.weight"].T
        return y + self.tensors[f"{self.prefix}{part}.bias"] if self.has_bias[part.split(".")[0]] else y

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention of `x: [T, ...]` over itself, row i at position i; `[T, hidden]`."""
        n = len(x)
        q = self.linear("self_attn.q_proj", x).view(n, self.n_heads, self.head_dim)
        k = self.linear("self_attn.k_proj", x).view(n, self.n_groups, self.head_dim)
        v = self.linear("self_attn.v_proj", x).view(n, self.n_groups, self.head_dim)
        q, k = rotate(q, self.frequencies), rotate(k, self.frequencies)
        heads = []
        for head in range(self.n_heads):
            group = head * self.n_groups // self.n_heads  # neighbouring query heads share keys and values
            scores = q[:, head] @ k[:, group].T / math.sqrt(self.head_dim)
            seen = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - self.window)
            heads.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ v[:, group])
        return self.linear("self_attn.o_proj", torch.cat(heads, dim=-1))

    def mlp(self, x: Tensor) -> Tensor:
        """down(silu(gate x) * up x)."""
        gate = self.linear("mlp.gate_proj", x)
        return self.linear("mlp.down_proj", gate * torch.sigmoid(gate) * self.linear("mlp.up_proj", x))


class Target:
    """A Llama checkpoint in Hugging Face's layout."""

    def __init__(self, directory: str | Path) -> None:
        self.config, self.tensors = read_config(directory), read_tensors(directory)
        self.n_layers = int(self.config["num_hidden_layers"])
        self.eps = float(self.config.get("rms_norm_eps", 1e-6))
        self.embedding = self.tensors["model.embed_tokens.weight"]
        is_tied = bool(self.config.get("tie_word_embeddings"))
        self.head = self.embedding if is_tied else self.tensors["lm_head.weight"]
        self.layers = [Layer(self.config, self.tensors, f"model.layers.{i}.") for i in range(self.n_layers)]

    def streams(self, tokens: Tokens) -> list[Tensor]:
        """The residual stream `[T, H]` as it enters each layer, and last as it leaves the last one, never normed."""
        x = self.embedding[torch.tensor(list(tokens))]
        streams = [x]
        for layer in self.layers:
            x = x + layer.attention(rms_norm(x, self.tensors[f"{layer.prefix}input_layernorm.weight"], self.eps))
            x = x + layer.mlp(rms_norm(x, self.tensors[f"{layer.prefix}post_attention_layernorm.weight"], self.eps))
            streams.append(x)
        return streams

    def logits(self, tokens: Tokens) -> Tensor:
        """`[T, V]` logits of the token that follows each position."""
        return rms_norm(self.streams(tokens)[-1], self.tensors["model.norm.weight"], self.eps) @ self.head.T

    def choices(self, tokens: Tokens) -> list[int]:
        """The target's token after each position."""
        return [first_largest(row) for row in self.logits(tokens)]


class Draft:
    """An EAGLE-3 head under SafeAILab's names (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `embed_tokens`).

    The target lends its embedding and head where the checkpoint brings none.
    """

    def __init__(self, directory: str | Path, target: Target) -> None:
        self.config, self.tensors = read_config(directory), read_tensors(directory)
        self.target = target
        self.eps = float(self.config.get("rms_norm_eps", 1e-6))
        self.taps = tap_inputs(self.config, target.n_layers)
        self.embedding = self.tensors.get("embed_tokens.weight", target.embedding)
        self.head = self.tensors.get("lm_head.weight", target.head)
        self.layer = Layer(self.config, self.tensors, "midlayer.")
        ids = torch.arange(len(self.head))
        # d2t holds offsets: target id = draft id + d2t[draft id].
        self.target_ids = (ids + self.tensors["d2t"].long() if "d2t" in self.tensors else ids).tolist()

    def features(self, tokens: Tokens) -> Tensor:
        """`[T, taps * H]` the target's streams that this draft reads, the lowest layer first."""
        streams = self.target.streams(tokens)
        return torch.cat([streams[i] for i in self.taps], dim=-1)

    def outputs(self, hidden: Tensor, tokens: Tokens) -> Tensor:
        """`[n, Hd]` the layer's outputs, before the final norm, for entries of `hidden: [n, Hd]` and a token each."""
        embedded = rms_norm(self.embedding[torch.tensor(list(tokens))], self.weight("input_layernorm"), self.eps)
        both = torch.cat([embedded, rms_norm(hidden, self.weight("hidden_norm"), self.eps)], dim=-1)
        r = hidden + self.layer.attention(both)  # the residual is the state itself, not its norm
        return r + self.layer.mlp(rms_norm(r, self.weight("post_attention_layernorm"), self.eps))

    def weight(self, norm: str) -> Tensor:
        """Weight of one of the layer's norms."""
        return self.tensors[f"midlayer.{norm}.weight"]

    def chain(self, tokens: Tokens, k: int) -> Chain:
        """The `k` tokens drafted after `tokens`, of which the target has read all but the last.

        Entry j joins the target's states at position j with the token at j + 1. Each further level appends an entry of
        the last level's own output and the token it chose; the target's states are never known there.
        """
        assert len(tokens) >= 2, "a draft follows a prompt and the target's first token"
        hidden = self.features(tokens[:-1]) @ self.tensors["fc.weight"].T
        entries, drafted, logits, states = list(tokens[1:]), [], [], []
        for _ in range(k):
            y = self.outputs(hidden, entries)[-1]
            logits.append(rms_norm(y, self.tensors["norm.weight"], self.eps) @ self.head.T)
            drafted.append(self.target_ids[first_largest(logits[-1])])
            states.append(y)
            hidden, entries = torch.cat([hidden, y[None]]), [*entries, drafted[-1]]
        return Chain(drafted, torch.stack(logits), torch.stack(states))

    def rank(self, logits: Tensor, token: int) -> int:
        """Place of target id `token` in the draft's order of `logits: [Vd]`; -1 outside its vocabulary."""
        if token not in self.target_ids:
            return -1
        own = self.target_ids.index(token)
        return int((logits > logits[own]).sum() + (logits[:own] == logits[own]).sum())


def greedy(target: Target, prompt: Tokens, n_new: int, stop_tokens: Tokens = ()) -> list[int]:
    """The target's own `n_new` tokens after `prompt`, up to and with the first stop token."""
    tokens: list[int] = []
    while len(tokens) < n_new and not (tokens and tokens[-1] in stop_tokens):
        tokens.append(target.choices([*prompt, *tokens])[-1])
    return tokens


def speculate(target: Target, draft: Draft, prompt: Tokens, *, k: int, n_new: int, stop_tokens: Tokens = ()) -> Decoded:
    """The same tokens as `greedy`, by drafting `k` a step and keeping what the target agrees with."""
    tokens, steps = greedy(target, prompt, 1), []
    while len(tokens) < n_new and tokens[-1] not in stop_tokens:
        sequence = [*prompt, *tokens]
        chain = draft.chain(sequence, k)
        choices = target.choices(sequence + chain.tokens)[len(sequence) - 1 :]  # after the sequence and each draft
        n_accepted = 0
        while n_accepted < k and chain.tokens[n_accepted] == choices[n_accepted]:
            n_accepted += 1
        committed = choices[: n_accepted + 1][: n_new - len(tokens)]
        stops = [i for i, token in enumerate(committed) if token in stop_tokens]
        committed = committed[: stops[0] + 1] if stops else committed
        ranks = [draft.rank(logits, token) for logits, token in zip(chain.logits, committed, strict=False)]
        steps.append(Step(chain.tokens, n_accepted, committed, ranks))
        tokens += committed
    return Decoded(tokens, steps)


def first_largest(logits: Tensor) -> int:
    """Index of the largest of `logits: [V]`, the lowest among equals."""
    return int((logits == logits.max()).nonzero()[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """`x: [T, H, D]` with dimensions i and i + D/2 turned by position * frequency i, row t at position t."""
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rotary_frequencies(config: dict[str, Any], head_dim: int) -> Tensor:
    """`[D / 2]` angle a position, by a config's RoPE keys in their old spelling (`rope_theta` beside `rope_scaling`)
    or their new one (`rope_parameters`); no key at all means base 10000, unscaled.

    They are made in fp32, as by every code that trains such models, and only then widened.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "linear":
        frequencies = frequencies / settings["factor"]
    elif kind == "llama3":  # long waves are stretched by `factor`, short ones kept, those between blended
        turns = settings["original_max_position_embeddings"] / (2 * math.pi / frequencies)
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # share of a frequency that stays as it is
        frequencies = (1.0 - kept) * frequencies / settings["factor"] + kept * frequencies
    else:
        assert kind == "default", f"RoPE of type {kind} is not written here"
    return frequencies.double()


def tap_inputs(config: dict[str, Any], n_layers: int) -> list[int]:
    """Captured layers by the input they are: id i is what enters layer i, and `n_layers` what leaves the last one.

    A stated convention wins. Without one, ids at the top are inputs (vLLM, speculators), those in `eagle_config` are
    outputs (SGLang, SpecForge, ModelOpt), and without ids the three are those that all of them default to.
    """
    name, nested = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config") or {}
    ids = config.get(name) or nested.get(name)
    if ids is None:
        return [2, n_layers // 2, n_layers - 3]
    stated = config.get("eagle_aux_hidden_state_layer_convention")
    convention = stated or ("input" if config.get(name) else "output")
    return sorted(i + 1 if convention == "output" else i for i in ids)


def read_config(directory: str | Path) -> dict[str, Any]:
    """`config.json`; a key that is null counts as absent."""
    config = json.loads((Path(directory) / "config.json").read_text())
    return {key: value for key, value in config.items() if value is not None}


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, every shard, floating ones in fp64."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(path)
    for path in sorted(Path(directory).glob("*.bin")):
        tensors |= torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
