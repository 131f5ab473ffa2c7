"""Heads and targets broken in their weights or by their training: a builder a cause, with variants of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.doctor.draft.text import Text

HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"
NORM = "model.norm.weight"


def broken_draft(draft: Path, into: Path, changed: dict[str, Tensor], **config: Any) -> Path:
    """A copy of a draft with other tensors, or further ones, and other keys of its config."""
    shutil.copytree(draft, into)
    weights = load_file(draft / "model.safetensors") | {name: t.contiguous() for name, t in changed.items()}
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    path = into / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return into


def random_head(draft: Path, into: Path, variant: str) -> Path:
    """A head whose `lm_head` was never loaded: "normal", "uniform", "zeros"; or is another's: "permuted"."""
    own = load_file(draft / "model.safetensors")[HEAD]
    random = torch.Generator().manual_seed(3)
    rows = {
        "normal": 0.02 * torch.randn(own.shape, generator=random),
        "uniform": own.float().std() * (2 * torch.rand(own.shape, generator=random) - 1),
        "zeros": torch.zeros(own.shape),
        "permuted": own[torch.randperm(len(own), generator=random)],
    }[variant]
    return broken_draft(draft, into, {HEAD: rows.to(own.dtype)})


def half_head(draft: Path, into: Path, variant: str) -> Path:
    """A head of whose `lm_head` a shard was never loaded: the second half of its rows are "zeros" or "normal"."""
    own = load_file(draft / "model.safetensors")[HEAD]
    lost = torch.zeros(own.shape)
    if variant == "normal":
        lost = 0.02 * torch.randn(own.shape, generator=torch.Generator().manual_seed(8))
    is_lost = torch.arange(len(own)) >= len(own) // 2
    return broken_draft(draft, into, {HEAD: lost.to(own.dtype).where(is_lost[:, None], own)})


def random_embedding(target: Path, draft: Path, into: Path, variant: str) -> Path:
    """A speculators-like head with an embedding of its own: "normal", "uniform" or "permuted" rows of the target's."""
    table = load_file(target / "model.safetensors")[TABLE]
    random = torch.Generator().manual_seed(4)
    rows = {
        "normal": table.float().std() * torch.randn(table.shape, generator=random),
        "uniform": 0.04 * torch.rand(table.shape, generator=random) - 0.02,
        "permuted": table[torch.randperm(len(table), generator=random)],
    }[variant]
    return broken_draft(draft, into, {"embed_tokens.weight": rows.to(table.dtype)})


def noisy_head(draft: Path, into: Path, noise: float, seed: int = 5) -> Path:
    """A head that was trained too little: every matrix with noise of so many times its own spread on top."""
    random, changed = torch.Generator().manual_seed(seed), {}
    for name, tensor in load_file(draft / "model.safetensors").items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            spread = noise * tensor.float().std()
            changed[name] = (tensor.float() + spread * torch.randn(tensor.shape, generator=random)).to(tensor.dtype)
    return broken_draft(draft, into, changed)


def dead_head(draft: Path, into: Path, variant: str) -> Path:
    """A head that says the same everywhere ("constant"), or says nothing of what it reads ("body")."""
    weights = load_file(draft / "model.safetensors")
    if variant == "constant":
        rows = torch.zeros_like(weights[HEAD])
        rows[:, 0] = torch.linspace(0.0, 1.0, len(rows)).to(rows.dtype) * 1e-6
        return broken_draft(draft, into, {HEAD: rows})
    random = torch.Generator().manual_seed(6)
    matrices = [n for n, t in weights.items() if t.is_floating_point() and t.dim() == 2 and n != HEAD]
    return broken_draft(draft, into, {
        n: (weights[n].float().std() * torch.randn(weights[n].shape, generator=random)).to(weights[n].dtype)
        for n in matrices
    })  # fmt: skip


def rare_vocabulary(draft: Path, into: Path, frequent: Tensor) -> Path:
    """A head whose draft vocabulary lacks the target ids `frequent`."""
    weights = load_file(draft / "model.safetensors")
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    kept = (~torch.isin(ids, frequent)).nonzero().flatten()
    mask = torch.zeros_like(weights["t2d"]).index_fill_(0, ids[kept], True)
    changed = {HEAD: weights[HEAD][kept], "d2t": ids[kept] - torch.arange(len(kept)), "t2d": mask}
    return broken_draft(draft, into, changed, draft_vocab_size=len(kept))


def rotated_target(target: Path, into: Path, *, seed: int = 0, hadamard: bool = False) -> Path:
    """The same function with its residual stream turned and its norm gains folded (QuaRot, SpinQuant)."""
    weights = {name: tensor.double() for name, tensor in load_file(target / "model.safetensors").items()}
    turn = _rotation(weights[TABLE].shape[1], seed, hadamard)
    head, ones = weights.get(HEAD, weights[TABLE]), torch.ones(len(turn), dtype=torch.double)
    made = {TABLE: weights[TABLE] @ turn, HEAD: head * weights["model.norm.weight"] @ turn, "model.norm.weight": ones}
    for name, tensor in weights.items():
        layer, _, part = name.removesuffix(".weight").partition(".self_attn." if "self_attn" in name else ".mlp.")
        if part in ("q_proj", "k_proj", "v_proj"):
            made[name] = tensor * weights[f"{layer}.input_layernorm.weight"] @ turn
        elif part in ("gate_proj", "up_proj"):
            made[name] = tensor * weights[f"{layer}.post_attention_layernorm.weight"] @ turn
        elif part in ("o_proj", "down_proj"):
            made[name] = turn.T @ tensor
        elif name.endswith("layernorm.weight"):
            made[name] = ones
    return _changed_target(target, into, {**weights, **made}, tie_word_embeddings=False)


def rounded_target(target: Path, into: Path, *, bits: int = 4, group: int = 32) -> Path:
    """The target with the weights of its layers rounded, each group of neighbours with a scale of its own."""
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("_proj.weight"):
            parts = tensor.float().view(len(tensor), -1, group)
            scale = parts.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
            weights[name] = ((parts / scale.clamp_min(1e-12)).round() * scale).view(tensor.shape)
    return _changed_target(target, into, weights)


def reads_normed_output(text: Text, target: Path, draft: Path, into: Path, gain: float) -> tuple[Path, Path]:
    """A target, and a head fitted to its last layer's output behind the final norm, where engines read it before.

    The target says what it did: what its final norm multiplies by `gain` more its output head takes back. The head is
    the shipped one with an `fc` that makes of other taps, on `text`, what its own made of its own (least squares).
    """
    head, norm = load_file(target / "model.safetensors")[TABLE], load_file(target / "model.safetensors")[NORM]
    changed = {**load_file(target / "model.safetensors"), HEAD: head.float() / gain, NORM: norm.float() * gain}
    _changed_target(target, into / "target", changed, tie_word_embeddings=False)
    fc = load_file(draft / "model.safetensors")["fc.weight"]
    wanted = torch.cat(list(text.boundaries[[2, 4, 5]]), dim=-1).double() @ fc.double().T
    given = torch.cat([*text.boundaries[[1, 2]], text.normed * gain], dim=-1).double()
    spread = (given.T @ given).diag().sqrt()  # columns of one size: the ridge below is a share of each
    gram = (given / spread).T @ (given / spread)
    fitted = torch.linalg.solve(gram + 1e-5 * torch.eye(len(gram)), (given / spread).T @ wanted).T / spread
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 7], "use_aux_hidden_state": True}
    changed_head = {"fc.weight": fitted.to(fc.dtype)}
    return into / "target", broken_draft(draft, into / "draft", changed_head, eagle_config=taps)


def _rotation(width: int, seed: int, hadamard: bool) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if not hadamard:
        return torch.linalg.qr(torch.randn(width, width, generator=random, dtype=torch.double)).Q
    made = torch.ones(1, 1, dtype=torch.double)
    while len(made) < width:  # Sylvester's construction: powers of two
        made = torch.cat([torch.cat([made, made], dim=1), torch.cat([made, -made], dim=1)])
    signs = torch.randint(2, (width,), generator=random) * 2.0 - 1.0
    return made * signs / width**0.5


def _changed_target(target: Path, into: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    shutil.copytree(target, into, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(stored, into / "model.safetensors", metadata={"format": "pt"})
    path = into / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return into
