"""Random draft heads in every published layout: how each stores its tensors, and what variants add to a plain one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
Config = dict[str, Any]
Change = Callable[[Config, Weights], None]
IDS, STATED = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_convention"


def read_head(directory: Path) -> tuple[Config, Weights]:
    """Config and tensors of a head."""
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


def write_head(directory: Path, config: Config, weights: Weights, *, pickled: bool = False) -> Path:
    """A head's folder."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, directory / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory


def _renamed(weights: Weights, rename: Callable[[str], str]) -> None:
    for name in list(weights):
        weights[rename(name)] = weights.pop(name)


def _behind(prefix: str, *, head_too: bool = True) -> Change:
    return lambda config, weights: _renamed(
        weights, lambda name: name if name == "lm_head.weight" and not head_too else prefix + name
    )


def _numbered(config: Config, weights: Weights) -> None:
    _renamed(weights, lambda name: name.replace("midlayer.", "layers.0."))


def _as_modelopt(config: Config, weights: Weights) -> None:
    _numbered(config, weights)
    ids = config.pop(IDS, [])
    flags = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
    config["eagle_config"] = {**flags, IDS: ids, **config.get("eagle_config", {})}
    config.update({"rope_theta": None, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}})


def _as_specforge(config: Config, weights: Weights) -> None:
    config["eagle_config"] = {"use_aux_hidden_state": True, **config.get("eagle_config", {})}
    config.update({"pretraining_tp": 1, "use_cache": True, "initializer_range": 0.02, "torch_dtype": "bfloat16"})


def _as_speculators(config: Config, weights: Weights) -> None:
    _numbered(config, weights)
    top = ("draft_vocab_size", "eagle_aux", "norm_", "fc_norm", "target_hidden_size", "bias", "logit_scale", "rope_is")
    if config.pop("return_hidden_post_norm", False):
        config["norm_output"] = True
    layer = {key: config.pop(key) for key in list(config) if not key.startswith(top)}
    flags = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
    config.update({**flags, **config, "transformer_layer_config": layer, "speculators_model_type": "eagle3"})
    config.update({"architectures": ["Eagle3DraftModel"], "speculators_version": "0.9.0"})
    config["speculators_config"] = {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]}
    weights["verifier_norm.weight"] = torch.ones(3)
    if "fc_norm.0.weight" in weights:
        del config["norm_before_fc"]


FORMATS: dict[str, Change] = {
    "safeailab": lambda config, weights: None,
    "specforge": _as_specforge,
    "modelopt": _as_modelopt,
    "speculators": _as_speculators,
    "nemo": _behind("model.", head_too=False),
    "behind draft_model": _behind("draft_model."),
    "behind module and model": _behind("module.model."),
    "midlayer.0": lambda config, weights: _renamed(weights, lambda name: name.replace("midlayer.", "midlayer.0.")),
}


class Changes:
    """What makes a plain head one of another variant; every tensor from one generator."""

    def __init__(self, config: Config, weights: Weights, hidden: int, vocab: int) -> None:
        self.config, self.weights, self.hidden, self.vocab = config, weights, hidden, vocab
        self.random, self.width = torch.Generator().manual_seed(7), int(config["hidden_size"])

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def _gain(self, n: int) -> Tensor:
        return 1.0 + 0.3 * self._normal(n)

    def flags(self, **flags: Any) -> None:
        """Keys at the top."""
        self.config.update(flags)

    def inner(self, **flags: Any) -> None:
        """Keys of `eagle_config`."""
        self.config["eagle_config"] = {**self.config.get("eagle_config", {}), **flags}

    def norm_over_all(self) -> None:
        """A norm over all taps before `fc`."""
        self.weights["input_norm.weight"] = self._gain(self.weights["fc.weight"].shape[1])

    def norm_over_each(self, names: tuple[str, ...] = ("fc_norm.0", "fc_norm.1", "fc_norm.2")) -> None:
        """A norm of each tap."""
        for name in names:
            self.weights[f"{name}.weight"] = self._gain(self.hidden)

    def norms_of_heads(self) -> None:
        """Norms of every head of q and k, as Qwen3's layer has them."""
        for name in "qk":
            self.weights[f"midlayer.self_attn.{name}_norm.weight"] = 1.5 * self._gain(int(self.config["head_dim"]))

    def biases(self, *maps: str) -> None:
        """Biases of maps, by their names without "weight"."""
        for name in maps:
            self.weights[f"{name}.bias"] = 0.5 * self._normal(len(self.weights[f"{name}.weight"]))

    def taps(self, ids: list[int], stated: str | None = None) -> None:
        """Other taps, `fc` as wide as they are."""
        self.config[IDS] = ids
        if stated is not None:
            self.config[STATED] = stated
        self.weights["fc.weight"] = self._normal(self.width, len(ids) * self.hidden) / 8

    def full_vocabulary(self, *, own_head: bool = True) -> None:
        """As many logits as the target has; the map is left out, or all zeros beside a mask of ones."""
        del self.weights["d2t"], self.weights["t2d"], self.config["draft_vocab_size"]
        self.weights["lm_head.weight"] = 3 * self._normal(self.vocab, self.width) / self.width**0.5
        if not own_head:
            del self.weights["lm_head.weight"]

    def own_embedding(self) -> None:
        """A table of its own."""
        self.weights["embed_tokens.weight"] = 0.5 * self._normal(self.vocab, self.width)

    def unsorted(self) -> None:
        """The same ids in another order."""
        n = len(self.weights["d2t"])
        ids = torch.arange(n) + self.weights["d2t"]
        self.weights["d2t"] = ids[torch.randperm(n, generator=self.random)] - torch.arange(n)

    def drop(self, *names: str) -> None:
        """Tensors left out."""
        for name in names:
            del self.weights[name]

    def rename(self, old: str, new: str) -> None:
        """A tensor under another name."""
        self.weights[new] = self.weights.pop(old)
