"""What a draft head computes, by the formulas of the published readers, from its raw files: naive, uncached, in fp64.

Nothing of the engine's loader is used, so that a key read with another meaning there shows here. Each row of `FUSION`,
`RESIDUAL`, `FEEDBACK` and `ACTIVATIONS` is one formula; which row a file means is asked of its raw keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from oracle import Target, first_largest, read_tensors, rms_norm, rotary_frequencies, rotate
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from lab.parity.head_containers import read_container

IDS, STATED = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_convention"
OLDER = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
PREFIXES = ("module.", "draft_model.", "model.", "layers.0.", "midlayer.")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
}
FUSION: dict[str, Callable[[HeadOracle, list[Tensor]], Tensor]] = {
    "plain": lambda head, taps: head.linear("fc", torch.cat(taps, -1)),
    "over all": lambda head, taps: head.linear("fc", head.norm("input_norm", torch.cat(taps, -1))),
    "over each": lambda head, taps: head.linear(
        "fc", torch.cat([head.norm(f"fc_norm.{i}", tap) for i, tap in enumerate(taps)], -1)
    ),
    "last": lambda head, taps: rms_norm(taps[0], head.target.tensors["model.norm.weight"], head.target.eps),
}
RESIDUAL: dict[bool, Callable[[HeadOracle, Tensor], Tensor]] = {
    False: lambda head, h: h,
    True: lambda head, h: head.norm("hidden_norm", h),
}
FEEDBACK: dict[bool, Callable[[HeadOracle, Tensor], Tensor]] = {
    False: lambda head, y: y,
    True: lambda head, y: head.norm("norm", y),
}


class HeadOracle:
    """A head beside its target.

    Args:
        directory: any layout that is built.
        target: the oracle's own target.
        norm_output: what the ambiguous key of a flat file means, "feedback" or "head".
    """

    def __init__(self, directory: Path, target: Target, norm_output: str | None = None) -> None:
        contained = read_container(directory)
        raw = _without_nulls(contained[0] if contained else json.loads((directory / "config.json").read_text()))
        self.target, self.inner = target, raw.get("eagle_config", {})
        self.layer, self.top = raw.get("transformer_layer_config", raw), raw
        stored = wide(contained[1]) if contained else read_tensors(directory)
        self.tensors = {_plain_name(name): tensor for name, tensor in stored.items()}
        self.eps = float(self.layer.get("rms_norm_eps", 1e-6))
        self.n_heads = int(self.layer["num_attention_heads"])
        self.n_groups = int(self.layer.get("num_key_value_heads", self.n_heads))
        self.head_dim = int(self.layer.get("head_dim", self.layer["hidden_size"] // self.n_heads))
        plain_rope = {**self.layer, "rope_scaling": _text_rope(self.layer.get("rope_scaling"))}
        scaling = self.layer.get("rope_scaling") or {}
        self.stretch = 1.0  # of rotated q and k
        if scaling.get("rope_type") == "yarn":
            self.stretch = 0.1 * math.log(scaling["factor"]) + 1.0
            self.frequencies = _yarn(float(self.layer["rope_theta"]), scaling, self.head_dim)
        else:
            self.frequencies = rotary_frequencies(_without_nulls(plain_rope), self.head_dim)
        kinds = self.layer.get("layer_types", ["sliding_attention" if self.layer.get("use_sliding_window") else ""])
        self.window = int(self.layer["sliding_window"]) if kinds[0] == "sliding_attention" else 1 << 30
        self.is_neox = bool(raw.get("rope_is_neox_style", True))
        self.fusion = self._fusion()
        self.taps = self._taps(raw)
        self.normed_residual = bool(self.flag("norm_before_residual"))
        nested = "transformer_layer_config" in raw
        feeds = raw.get("norm_output", False) if nested or norm_output == "feedback" else self.inner.get("norm_output")
        self.feeds_normed = bool(feeds or self.flag("return_hidden_post_norm"))
        self.act = ACTIVATIONS[self.layer.get("hidden_act", "silu")]
        self.embedding = self.tensors.get("embed_tokens.weight", target.embedding)
        self.head = self._head()
        rows = torch.arange(len(self.head))
        offsets = self.tensors.get("d2t", self.tensors.get("draft_id_to_target_id", torch.zeros_like(rows)))
        self.target_ids = (rows + offsets.long()).tolist()

    def flag(self, key: str, default: Any = None) -> Any:
        """A key of `eagle_config` or of the top; the inner one wins."""
        return self.inner.get(key, self.top.get(key, default))

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T, and the bias that is stored beside W."""
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x / rms(x) times a stored gain."""
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def _fusion(self) -> str:
        if self.flag("use_aux_hidden_state", True) is False:
            return "last"
        if self.flag("norm_before_fc", "input_norm.weight" in self.tensors):
            return "over all"
        return "over each" if "fc_norm.0.weight" in self.tensors else "plain"

    def _taps(self, raw: dict[str, Any]) -> list[int]:
        """Boundaries that are read: boundary i enters layer i, the last one leaves the last layer."""
        n = self.target.n_layers
        if self.fusion == "last":
            return [n]
        top, inner = raw.get(IDS), self.inner.get(IDS)
        ids = top or inner
        if not ids:
            return [2, n // 2, n - 3]
        stated = raw.get(STATED, self.inner.get(STATED))
        if stated is None and "transformer_layer_config" in raw and top:
            stated = "input"
        if stated is None and n in ids:
            stated = "input"
        if stated is None and ids[0] in (-1, 1):
            stated = "output"
        if stated is None and (ids[0] == 2 or ids == [2, n // 2, n - 3]):
            stated = "input"
        stated = stated or ("input" if top else "output")
        return [i + (stated == "output") for i in ids]

    def _head(self) -> Tensor:
        scale = float(self.top.get("logit_scale", self.layer.get("logit_scale", 1.0)))
        own = self.tensors.get("lm_head.weight")
        if own is None and self.top.get("tie_word_embeddings"):
            own = self.embedding
        head = self.target.head if own is None else own
        return head if scale == 1.0 else scale * head  # a copy is gigabytes at true size

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention of `x: [T, 2 Hd]` over itself, row i at position i."""
        n, mixed = len(x), []
        q, k, v = (self.linear(f"self_attn.{name}_proj", x).view(n, -1, self.head_dim) for name in "qkv")
        if "self_attn.q_norm.weight" in self.tensors:
            q, k = self.norm("self_attn.q_norm", q), self.norm("self_attn.k_norm", k)
        q, k = self.stretch * self._turned(q), self.stretch * self._turned(k)
        for head in range(self.n_heads):
            group = head * self.n_groups // self.n_heads
            scores = q[:, head] @ k[:, group].T / math.sqrt(self.head_dim)
            back = torch.arange(n)[:, None] - torch.arange(n)
            hidden = (back < 0) | (back >= self.window)
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, group])
        return self.linear("self_attn.o_proj", torch.cat(mixed, -1))

    def _turned(self, x: Tensor) -> Tensor:
        if self.is_neox:
            return rotate(x, self.frequencies)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * self.frequencies
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(angles.cos() ** 0, angles)
        return torch.view_as_real(turned).flatten(-2)

    def outputs(self, h: Tensor, tokens: Sequence[int]) -> Tensor:
        """`[n, Hd]` what leaves the layer, before the final norm."""
        embedded = self.norm("input_layernorm", self.embedding[torch.tensor(list(tokens))])
        state = self.norm("hidden_norm", h) if "hidden_norm.weight" in self.tensors else h
        r = RESIDUAL[self.normed_residual](self, h) + self.attention(torch.cat([embedded, state], -1))
        z = self.norm("post_attention_layernorm", r)
        gated = self.act(self.linear("mlp.gate_proj", z)) * self.linear("mlp.up_proj", z)
        return r + self.linear("mlp.down_proj", gated)

    def chain(self, tokens: Sequence[int], k: int) -> tuple[Tensor, list[int]]:
        """`[k, Vd]` logits of a first pass and of the chained ones, and the target ids they choose."""
        streams = self.target.streams(tokens[:-1])
        h = FUSION[self.fusion](self, [streams[i] for i in self.taps])
        entries, logits, drafted = list(tokens[1:]), [], []
        for _ in range(k):
            y = self.outputs(h, entries)[-1]
            logits.append(self.norm("norm", y) @ self.head.T)
            drafted.append(self.target_ids[first_largest(logits[-1])])
            h, entries = torch.cat([h, FEEDBACK[self.feeds_normed](self, y)[None]]), [*entries, drafted[-1]]
        return torch.stack(logits), drafted


def _plain_name(stored: str) -> str:
    name = stored
    while name.startswith(PREFIXES):
        name = next(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))
    name = name.removeprefix("0.")  # of midlayer.0.
    first = name.split(".")[0]
    return name.replace(first, OLDER[first]) if first in OLDER else name


def _yarn(theta: float, scaling: dict[str, Any], head_dim: int) -> Tensor:
    """Frequencies between stretched and plain ones, by how often a pair turns in the trained context.

    Source: YaRN, arXiv 2309.00071, section 3.2; without rounding the ramp's ends.
    """
    assert scaling["truncate"] is False, "rounded ends are not written here"
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    plain = theta ** (-2 * pairs / head_dim)

    def pair_that_turns(times: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(pair_that_turns(scaling["beta_fast"]), 0), min(pair_that_turns(scaling["beta_slow"]), head_dim - 1)
    share = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / scaling["factor"] * share + plain * (1 - share)


def _without_nulls(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _text_rope(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """mrope turns text as the plain rotation does: its three rows of positions are equal."""
    if scaling and "mrope" in (scaling.get("rope_type"), scaling.get("type")):
        return {**scaling, "rope_type": "default"}
    return scaling


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Floating ones in fp64."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
