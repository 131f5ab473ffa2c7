"""TurboMind directories and GGUF files taken apart naively, for oracles: nothing of the engine's reader is used.

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

_RAW = {0: torch.float32, 1: torch.float16, 27: torch.int64, 30: torch.bfloat16}
_NUMBERS = {4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}
_OF_GGUF = {
    "output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens", "blk.0.attn_norm": "input_layernorm",
    "blk.0.attn_norm_2": "hidden_norm", "blk.0.ffn_norm": "post_attention_layernorm",
    "blk.0.attn_output": "self_attn.o_proj", **{f"blk.0.attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"blk.0.ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}  # fmt: skip


def read_container(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Keys as config.json spells them, and tensors by short name; None for another kind of directory."""
    if (directory / "config.yaml").is_file():
        return _turbomind(directory)
    for path in directory.glob("*.gguf"):
        return _gguf(path.read_bytes())
    return None


def _turbomind(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    said = yaml.safe_load((directory / "config.yaml").read_text())["model_config"]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[said["eagle_weight_dtype"]]
    wide, inner, query, key = said["hidden_units"], said["inter_size"], said["eagle_q_size"], said["eagle_kv_size"]

    def file(name: str, *shape: int) -> Tensor:
        data = bytearray((directory / f"{name}.weight").read_bytes())
        return torch.frombuffer(data, dtype=kind).view(*shape)

    fused = file("layers.0.attention.w_qkv", 2 * wide, query + 2 * key)
    tensors = {
        "fc.weight": file("eagle_fc", said["eagle_fc_in_dim"], wide).T,
        "embed_tokens.weight": file("tok_embeddings", said["vocab_size"], wide),
        "lm_head.weight": file("output", wide, said["draft_vocab_size"]).T,
        "norm.weight": file("norm", wide),
        "input_layernorm.weight": file("layers.0.attention_norm", wide),
        "hidden_norm.weight": file("layers.0.hidden_norm", wide),
        "post_attention_layernorm.weight": file("layers.0.ffn_norm", wide),
        "self_attn.q_proj.weight": fused[:, :query].T,
        "self_attn.k_proj.weight": fused[:, query : query + key].T,
        "self_attn.v_proj.weight": fused[:, query + key :].T,
        "self_attn.o_proj.weight": file("eagle3.o_proj", wide, query),
        "mlp.gate_proj.weight": file("layers.0.feed_forward.w1", inner, wide),
        "mlp.up_proj.weight": file("layers.0.feed_forward.w3", inner, wide),
        "mlp.down_proj.weight": file("layers.0.feed_forward.w2", inner, wide).T,
    }
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    if (directory / "draft_id_to_target_id.weight").is_file():
        data = bytearray((directory / "draft_id_to_target_id.weight").read_bytes())
        tensors["d2t"] = torch.frombuffer(data, dtype=torch.int32)
    config = {
        "hidden_size": wide, "num_attention_heads": said["head_num"], "head_dim": said["size_per_head"],
        "num_key_value_heads": key // said["size_per_head"], "rms_norm_eps": said["norm_eps"],
        "rope_theta": said["rope_theta"], "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": said["eagle_capture_layers"],
            "eagle_aux_hidden_state_layer_convention": "output"},
    }  # fmt: skip
    return config, tensors


def _gguf(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    at = 24

    def take(code: str) -> Any:
        nonlocal at
        [value] = struct.unpack_from(f"<{code}", data, at)
        at += struct.calcsize(f"<{code}")
        return value

    def text() -> str:
        return bytes(take(f"{take('Q')}s")).decode()

    def value(kind: int) -> Any:
        if kind == 9:
            of, n = take("I"), take("Q")
            return [value(of) for _ in range(n)]
        return text() if kind == 8 else take(_NUMBERS[kind])

    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    said = {text(): value(take("I")) for _ in range(n_keys)}
    infos = []
    for _ in range(n_tensors):
        name, n = text(), take("I")
        infos.append((name, [take("Q") for _ in range(n)][::-1], take("I"), take("Q")))
    begin, tensors = -(-at // 32) * 32, {}
    for name, shape, kind, offset in infos:
        n = int(torch.Size(shape).numel())
        whole = torch.frombuffer(
            bytearray(data[begin + offset : begin + offset + n * _RAW[kind].itemsize]), dtype=_RAW[kind]
        )
        short = name.removesuffix(".weight")
        named = f"{_OF_GGUF.get(short, short)}.weight" if name != "d2t" else "d2t"
        tensors[named] = whole.view(*shape).double() if whole.is_floating_point() else whole - torch.arange(n)
    keys = {name.removeprefix("eagle3."): entry for name, entry in said.items()}
    config = {
        "hidden_size": keys["embedding_length"], "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count_kv"], "head_dim": keys["attention.key_length"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"], "rope_theta": keys["rope.freq_base"],
        "rope_is_neox_style": False, "norm_before_residual": keys.get("norm_before_residual", False),
        "fc_norm": keys.get("fc_norm", False), "return_hidden_post_norm": keys.get("norm_output", False),
        "eagle_aux_hidden_state_layer_ids": keys["extract_layers"], "eagle_aux_hidden_state_layer_convention": "input",
    }  # fmt: skip
    return config, tensors
