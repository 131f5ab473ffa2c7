"""TurboMind directories and GGUF files of a head taken apart naively: nothing of the engine's reader is used.

Names, orders and transpositions are the formats' own: a TurboMind directory's as a fork of LMDeploy writes them, GGUF's
as llama.cpp's converter does (docs/checkpoints.md).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lab.errors import ExperimentError

Contents = tuple[dict[str, Any], dict[str, Tensor]]
_RAW = {0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64,
        28: torch.float64, 30: torch.bfloat16}  # fmt: skip
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_OF_GGUF = {
    "output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens",
    "blk.0.attn_norm": "midlayer.input_layernorm", "blk.0.attn_norm_2": "midlayer.hidden_norm",
    "blk.0.hidden_norm": "midlayer.hidden_norm", "blk.0.ffn_norm": "midlayer.post_attention_layernorm",
    "blk.0.attn_output": "midlayer.self_attn.o_proj",
    **{f"blk.0.attn_{x}": f"midlayer.self_attn.{x}_proj" for x in "qkv"},
    **{f"blk.0.ffn_{x}": f"midlayer.mlp.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip
_SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings",
}  # fmt: skip


def read_container(directory: Path) -> Contents | None:
    """Keys as config.json spells them, and tensors as stored, by SafeAILab's names; None for another kind of directory.

    Raises:
        ExperimentError: a rotary scaling of a GGUF file that only its factors tell.
    """
    if (directory / "config.json").is_file():  # of a published folder, whatever lies beside it
        return None
    if (directory / "config.yaml").is_file():
        return _turbomind(directory)
    for path in directory.glob("*.gguf"):
        return _gguf(path)
    return None


def _turbomind(directory: Path) -> Contents:
    said = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))["model_config"]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[said["eagle_weight_dtype"]]
    wide, inner, query, key = said["hidden_units"], said["inter_size"], said["eagle_q_size"], said["eagle_kv_size"]

    def file(name: str, *shape: int) -> Tensor:
        data = bytearray((directory / f"{name}.weight").read_bytes())
        return torch.frombuffer(data, dtype=kind).view(*shape)

    fused = file("layers.0.attention.w_qkv", 2 * wide, query + 2 * key)
    q, k, v = fused.T.tensor_split([query, query + key])
    tensors = {
        "fc.weight": file("eagle_fc", said["eagle_fc_in_dim"], wide).T,
        "embed_tokens.weight": file("tok_embeddings", said["vocab_size"], wide),
        "lm_head.weight": file("output", wide, said["draft_vocab_size"]).T,
        "norm.weight": file("norm", wide),
        "midlayer.input_layernorm.weight": file("layers.0.attention_norm", wide),
        "midlayer.hidden_norm.weight": file("layers.0.hidden_norm", wide),
        "midlayer.post_attention_layernorm.weight": file("layers.0.ffn_norm", wide),
        "midlayer.self_attn.q_proj.weight": q,
        "midlayer.self_attn.k_proj.weight": k,
        "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.o_proj.weight": file("eagle3.o_proj", wide, query),
        "midlayer.mlp.gate_proj.weight": file("layers.0.feed_forward.w1", inner, wide),
        "midlayer.mlp.up_proj.weight": file("layers.0.feed_forward.w3", inner, wide),
        "midlayer.mlp.down_proj.weight": file("layers.0.feed_forward.w2", inner, wide).T,
    }
    if (directory / "draft_id_to_target_id.weight").is_file():
        data = bytearray((directory / "draft_id_to_target_id.weight").read_bytes())
        tensors["d2t"] = torch.frombuffer(data, dtype=torch.int32)
    config = {
        "hidden_size": wide, "intermediate_size": inner, "num_attention_heads": said["head_num"],
        "head_dim": said["size_per_head"], "num_key_value_heads": key // said["size_per_head"],
        "vocab_size": said["vocab_size"], "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": said["eagle_capture_layers"],
            "eagle_aux_hidden_state_layer_convention": "output"},
    }  # fmt: skip
    usual = {"norm_eps": "rms_norm_eps", "rope_theta": "rope_theta", "max_position_embeddings": None}
    return config | {ours or theirs: said[theirs] for theirs, ours in usual.items() if theirs in said}, tensors


class _Bytes:
    """A GGUF file from its 24th byte on, where the keys begin."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 24

    def take(self, code: str) -> Any:
        [value] = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        return bytes(self.take(f"{self.take('Q')}s")).decode()

    def value(self, kind: int) -> Any:
        if kind == 9:
            of, n = self.take("I"), self.take("Q")
            return [self.value(of) for _ in range(n)]
        value = self.text() if kind == 8 else self.take(_NUMBERS[kind])
        return float(f"{value:.7g}") if kind == 6 else value  # what was written: 1e-05, not 9.99999974e-06


def _gguf(path: Path) -> Contents:
    data = path.read_bytes()
    file = _Bytes(data)
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    said = {file.text(): file.value(file.take("I")) for _ in range(n_keys)}
    infos = []
    for _ in range(n_tensors):
        name, n = file.text(), file.take("I")
        infos.append((name, [file.take("Q") for _ in range(n)][::-1], file.take("I"), file.take("Q")))
    step = said.get("general.alignment", 32)
    begin, tensors = -(-file.at // step) * step, dict[str, Tensor]()
    for name, shape, kind, offset in infos:
        n_bytes = int(torch.Size(shape).numel()) * _RAW[kind].itemsize
        whole = torch.frombuffer(bytearray(data[begin + offset : begin + offset + n_bytes]), dtype=_RAW[kind])
        short = name.removesuffix(".weight")
        if short == "d2t":  # ids, where other layouts have offsets
            tensors["d2t"] = whole - torch.arange(len(whole))
        else:
            tensors[f"{_OF_GGUF.get(short, short)}.weight"] = whole.view(*shape)
    return _keys_of_gguf(path, said, tensors.pop("rope_freqs.weight", None)), tensors


def _keys_of_gguf(path: Path, said: dict[str, Any], factors: Tensor | None) -> dict[str, Any]:
    keys = {name.removeprefix("eagle3."): value for name, value in said.items()}
    config = {ours: keys[theirs] for theirs, ours in _SIZES.items() if theirs in keys}
    config |= {
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"], "rope_theta": keys["rope.freq_base"],
        "rope_is_neox_style": False, "norm_before_residual": keys.get("norm_before_residual", False),
        "fc_norm": keys.get("fc_norm", False), "return_hidden_post_norm": keys.get("norm_output", False),
        "eagle_aux_hidden_state_layer_ids": keys["extract_layers"], "eagle_aux_hidden_state_layer_convention": "input",
    }  # fmt: skip
    scaling = {
        name.removeprefix("rope.scaling.").removeprefix("yarn_"): value
        for name, value in keys.items()
        if name.startswith("rope.scaling.")
    }
    llama3 = "eagle3lab.rope.llama3."  # which explain the factors
    if any(name.startswith(llama3) for name in said):
        named = {name.removeprefix(llama3): value for name, value in said.items() if name.startswith(llama3)}
        return config | {"rope_scaling": {"rope_type": "llama3", **named}}
    if factors is not None and not bool((factors == 1).all()):
        raise ExperimentError(
            f"{path.name} stretches rotary frequencies by factors (rope_freqs) that no key explains",
            "factors of 1, or a file that `eagle3lab convert` wrote",
            "compare the head that the file was converted from",
        )
    if scaling.get("type", "none") != "none":
        names = {"type": "rope_type", "original_context_length": "original_max_position_embeddings"}
        return config | {"rope_scaling": {names.get(name, name): value for name, value in scaling.items()}}
    return config
