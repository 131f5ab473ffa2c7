"""A head in a GGUF file of llama.cpp, architecture `eagle3`: its keys and names in those of the published layouts.

Rows of q and k are stored with rotary pairs as neighbours, `d2t` holds absolute ids, and the converter writes the usual
taps whatever the head was trained with. Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.checkpoint.containers.gguf_header import Entry, read_header
from eagle3core.checkpoint.rope import llama3_factors, read_rope
from eagle3core.checkpoint.settings import Settings
from eagle3core.checkpoint.taps import TAP_KEY
from eagle3core.checkpoint.tensors import NamedTensors
from eagle3core.errors import CheckpointError

ARCHITECTURE = "eagle3"
FREQUENCIES = "rope_freqs.weight"
LLAMA3 = "eagle3lab.rope.llama3."  # keys of ours: the settings that made the factors of `rope_freqs`
# Number of a layer-0 tensor in the file, by SafeAILab name.
STORED = {
    "fc.weight": "fc.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    **{f"fc_norm.{i}.weight": f"fc_norm.{i}.weight" for i in range(8)},
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    **{f"midlayer.self_attn.{name}_proj.weight": f"blk.0.attn_{name}.weight" for name in "qkv"},
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    **{f"midlayer.mlp.{name}_proj.weight": f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down")},
}
_OTHER_NAMES = {"blk.0.hidden_norm.weight": "midlayer.hidden_norm.weight", "d2t.weight": "d2t"}
DTYPES = {0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64,
          28: torch.float64, 30: torch.bfloat16}  # fmt: skip
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "target_hidden_size": "target_hidden_size",
}
FLAGS = {"norm_before_residual": "norm_before_residual", "fc_norm": "fc_norm", "norm_output": "return_hidden_post_norm"}
EPSILON, BASE, TAPS, SCALING = "attention.layer_norm_rms_epsilon", "rope.freq_base", "extract_layers", "rope.scaling."
_KNOWN = {*SIZES, *FLAGS, EPSILON, BASE, TAPS, "rope.dimension_count", "attention.value_length"}
_DOUBT = "others: llama.cpp's converter writes the usual ones whatever the head was trained with (see capture_layers)"


class GgufTensors(NamedTensors):
    """The tensors of one file under SafeAILab names."""

    def __init__(self, path: Path, entries: dict[str, Entry]) -> None:
        super().__init__(path.parent)
        self.path, self.described_in = path, path.name
        stored = {stored: name for name, stored in STORED.items()} | _OTHER_NAMES
        self._entries: dict[str, Entry] = {}
        for name, entry in entries.items():
            ours = stored.get(name, name)
            if ours in self._entries:
                raise CheckpointError(f"{path} holds {ours} under two names", "each tensor once", "convert it again")
            self._entries[ours] = entry
        self._frequencies = self._entries.pop(FREQUENCIES, None)
        self._data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    @property
    def names(self) -> list[str]:
        """As of the base."""
        return sorted(self._entries)

    def where(self, name: str) -> str:
        """As of the base."""
        return f"{self.path}: tensor {STORED.get(name, name)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """As of the base."""
        return self._entries[name].shape

    def read(self, name: str) -> Tensor:
        """As of the base; `d2t` as offsets."""
        tensor = self._tensor(self._entries[name])
        if name == "d2t" and not tensor.dtype.is_floating_point and tensor.dim() == 1:
            return tensor - torch.arange(len(tensor), dtype=tensor.dtype)
        return tensor

    def factors(self) -> list[float] | None:
        """Divisors of the rotary frequencies, one a pair; None where there are none."""
        if self._frequencies is None:
            return None
        if len(self._frequencies.shape) != 1 or self._frequencies.shape[0] > 4096:
            raise CheckpointError(
                f"{self.path}: {FREQUENCIES} has shape {list(self._frequencies.shape)}", "one value a rotary pair",
                "convert the head again",
            )  # fmt: skip
        return [float(value) for value in self._tensor(self._frequencies).float()]

    def _tensor(self, entry: Entry) -> Tensor:
        dtype = DTYPES[entry.kind]
        n_bytes = dtype.itemsize * int(torch.Size(entry.shape).numel())
        return self._data[entry.start : entry.start + n_bytes].view(dtype).view(entry.shape)


def open_gguf(path: Path) -> tuple[Settings, GgufTensors]:
    """Config in the published keys, and tensors.

    Raises:
        CheckpointError: a damaged file, another architecture, or a key whose meaning is not known.
    """
    metadata, entries = read_header(path)
    raw = Settings(metadata, str(path))
    if raw.text("general.architecture") != ARCHITECTURE:
        raise raw.bad(
            "general.architecture", metadata.get("general.architecture"), f"{ARCHITECTURE!r}, an EAGLE-3 head"
        )
    _refuse_unknown(raw)
    tensors = GgufTensors(path, entries)
    config: dict[str, Any] = {"model_type": "llama", "hidden_act": "silu", "rope_is_neox_style": False}
    for theirs, ours in SIZES.items():
        if f"{ARCHITECTURE}.{theirs}" in raw:
            config[ours] = raw.count(f"{ARCHITECTURE}.{theirs}")
    for theirs, ours in FLAGS.items():
        if f"{ARCHITECTURE}.{theirs}" in raw:
            config[ours] = raw.flag(f"{ARCHITECTURE}.{theirs}")
    config["rms_norm_eps"] = decimal(raw.number(f"{ARCHITECTURE}.{EPSILON}"))
    config["rope_theta"] = decimal(raw.number(f"{ARCHITECTURE}.{BASE}", 10000.0))
    if "draft_vocab_size" not in config and "lm_head.weight" in tensors:
        config["draft_vocab_size"] = tensors.shape("lm_head.weight")[0]
    elif "d2t" in tensors:
        config["draft_vocab_size"] = tensors.shape("d2t")[0]
    ids = raw.ids(f"{ARCHITECTURE}.{TAPS}")
    if ids:
        config[TAP_KEY], config[f"{TAP_KEY[:-4]}_convention"] = list(ids), "input"
        tensors.of_taps = (f"{ARCHITECTURE}.{TAPS} of {path.name} numbers inputs", _DOUBT)
    config |= _rope(raw, config, tensors)
    return Settings(config, f"{path} (keys as config.json has them)"), tensors


def _refuse_unknown(raw: Settings) -> None:
    for name, value in raw.values.items():
        key = name.removeprefix(f"{ARCHITECTURE}.")
        if key != name and key not in _KNOWN and not key.startswith(SCALING) and value not in (False, 0, "", []):
            raise raw.bad(
                name, value, f"a key that is read: {', '.join(sorted(_KNOWN))}, or one that is false, 0 or empty",
                "what it means is not known here, and ignoring it might be wrong",
            )  # fmt: skip


def _rope(raw: Settings, config: dict[str, Any], tensors: GgufTensors) -> dict[str, Any]:
    """Rotary settings: a scaling by name, or the factors of `rope_freqs`."""
    prefix = f"{ARCHITECTURE}.{SCALING}"
    kind, factors = raw.text(f"{prefix}type", "none"), tensors.factors()
    if factors is not None and any(factor != 1.0 for factor in factors):
        return {"rope_scaling": _of_factors(raw, config, tensors, factors)}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise raw.bad(f"{prefix}type", kind, "none, linear or yarn", "use a head with one of these")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": decimal(raw.number(f"{prefix}factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = raw.count(f"{prefix}original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if f"{prefix}yarn_{key}" in raw:
                scaling[key] = decimal(raw.number(f"{prefix}yarn_{key}"))
    return {"rope_scaling": scaling}


def _of_factors(raw: Settings, config: dict[str, Any], tensors: GgufTensors, factors: list[float]) -> dict[str, Any]:
    """Factors as Llama 3's scaling where the keys of ours say so and make them; else as a list that never changes."""
    named = {name.removeprefix(LLAMA3): value for name, value in raw.values.items() if name.startswith(LLAMA3)}
    if named:
        scaling = {key: decimal(value) if isinstance(value, float) else value for key, value in named.items()}
        scaling["rope_type"] = "llama3"
        settings = Settings({**config, "rope_scaling": scaling}, raw.source)
        rope = read_rope(settings, settings.count("max_position_embeddings", 2048))
        made = llama3_factors(rope, 2 * len(factors)).to(torch.float32)
        if torch.allclose(made, torch.tensor(factors), rtol=1e-6):
            return scaling
        raise raw.bad(
            LLAMA3 + "factor", named.get("factor"), f"settings that make the factors of {FREQUENCIES}",
            "convert the head again, or remove these keys",
        )  # fmt: skip
    trained = int(config.get("max_position_embeddings", 2048))
    return {
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
        "factor": 1.0, "original_max_position_embeddings": trained,
    }  # fmt: skip


def decimal(value: float) -> float:
    """The shortest decimal that is this value in 32 bits, which is what was stored: 1e-05, not 9.99999974e-06."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))
