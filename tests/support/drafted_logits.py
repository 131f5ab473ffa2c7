"""What a first step drafts, with the logits that it was chosen from: for heads held against other readers of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle3core import Engine, EngineConfig, GenerationConfig, SpeculativeConfig
from eagle3core.trace import RecordingTrace


def drafted(
    target: Path, draft: Path, prompt: Sequence[int], k: int, norm_output: str | None = None, *, as_tree: bool = False
) -> tuple[list[int], Tensor, list[int]]:
    """The sequence that a first step drafts after, its logits `[k, Vd]` and its drafts, by the engine in fp32."""
    spec = SpeculativeConfig(
        model=str(draft), num_speculative_tokens=k, norm_output=norm_output,  # type: ignore[arg-type]
        choices=[[0] * depth for depth in range(1, k + 1)] if as_tree else None,
    )  # fmt: skip
    config = EngineConfig(
        session_len=32, max_batch_size=1, block_size=16, prefill_chunk=16, device="cpu", dtype="float32",
        speculative_config=spec,
    )  # fmt: skip
    engine, trace = Engine.from_pretrained(target, config), RecordingTrace()
    engine.trace = trace
    engine.generate([list(prompt)], GenerationConfig(max_new_tokens=2, ignore_eos=True))
    scopes = ["extend", *(f"{'level' if as_tree else 'chain'}{level}" for level in range(1, k))]
    logits = torch.cat([trace.tensors[f"step0/{scope}/draft.head"] for scope in scopes])
    return [*prompt, *trace.tensors["first_token"].tolist()], logits, trace.tensors["step0/tree.tokens"].tolist()[1:]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest logit; columns of `ours` that are padding are left out."""
    ours, theirs = ours[:, : theirs.shape[1]].double(), theirs.double()
    return float((ours - theirs).abs().max() / theirs.abs().max())
