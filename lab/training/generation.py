"""Text the target writes itself, greedily: what a draft must predict when it is used.

Acceptance is measured under greedy decoding, so most of the draft's lessons are greedy text. Openings come from the
training text; some are continued by sampling first, so that the greedy part also starts from contexts the target has
never seen, as it does on held-out prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache

from lab.acceptance.loops import LOOP_GRAM
from lab.training.sizes import PairSize
from lab.training.target import logits_of, mixed_precision, windows
from lab.training.tokenizer import END_ID

_OPENINGS = (16, 32, 64, 96, 128)
_SAMPLED = (0, 0, 16, 48)


@torch.no_grad()
def continue_greedily(model: Any, prompts: Sequence[Sequence[int]], n_new: int, n_sampled: int = 0) -> Tensor:
    """`[B, n_new]` int64 continuations on the CPU, nothing stopping at the end token.

    Args:
        model: a Hugging Face causal model in eval mode.
        prompts: token ids, of any lengths (shorter ones are padded on the left and masked).
        n_new: tokens to write.
        n_sampled: how many of the first are drawn at temperature 1 from the global random state; the others are argmax.
    """
    device = model.device
    longest = max(len(prompt) for prompt in prompts)
    gaps = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[END_ID] * gap + list(row) for gap, row in zip(gaps, prompts, strict=True)], device=device)
    mask = (torch.arange(longest, device=device) >= torch.tensor(gaps, device=device)[:, None]).long()
    ragged = any(gaps)
    cache, written = DynamicCache(config=model.config), []
    for i in range(n_new):
        masked: dict[str, Tensor] = {}
        if ragged:
            mask = mask if i == 0 else torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
            masked = {"attention_mask": mask, "position_ids": positions}
        with mixed_precision(device):
            hidden = model.model(tokens, past_key_values=cache, use_cache=True, **masked).last_hidden_state[:, -1]
        logits = logits_of(model, hidden)
        sampled = i < n_sampled
        tokens = torch.multinomial(logits.softmax(-1), 1) if sampled else logits.argmax(-1, keepdim=True)
        written.append(tokens)
    return torch.cat(written, dim=1).cpu()


def write_lessons(
    model: Any, stream: Tensor, size: PairSize, seed: int, advance: Callable[[float, str], None]
) -> tuple[Tensor, Tensor]:
    """Sequences for the draft: openings of the training text, continued by the target.

    Args:
        model: the trained target.
        stream: training tokens `[N]` on its device.
        size: how many, and how long (the draft's window plus the token after it).
        seed: of openings and sampling.
        advance: told the share done.

    Returns:
        tokens `[sequences, window + 1]` int16-representable int64 on the CPU, and `[sequences]` the index from which
        each is greedy.
    """
    length, n_batches = size.draft.window + 1, -(-size.sequences // size.generation_batch)
    tokens, greedy_from = [], []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for i in range(n_batches):
            torch.manual_seed(seed * 1_000_003 + i)
            opening = min(_OPENINGS[i % len(_OPENINGS)], length // 2)
            sampled = min(_SAMPLED[i % len(_SAMPLED)], length // 4)
            random = torch.Generator().manual_seed(seed * 1_000_003 + i)
            rows = min(size.generation_batch, size.sequences - i * size.generation_batch)
            start = windows(stream, rows, opening, random).cpu()
            written = continue_greedily(model, start.tolist(), length - opening, sampled)
            tokens.append(torch.cat([start, written], dim=1))
            greedy_from.append(torch.full((rows,), opening + sampled))
            advance((i + 1) / n_batches, f"{(i + 1) * rows} sequences")
    return torch.cat(tokens), torch.cat(greedy_from)


def looped_tokens(rows: npt.NDArray[np.integer], gram: int = LOOP_GRAM) -> npt.NDArray[np.bool_]:
    """Which tokens of each row `[R, T]` lie in a `gram`-gram seen earlier there: `lab.acceptance.loops` for arrays.

    Grams are compared by a 64-bit polynomial hash: at these sizes a chance equality is below one in 10^9.
    """
    n_rows, length = rows.shape
    looped = np.zeros((n_rows, length), dtype=bool)
    if length < gram:
        return looped
    hashes = np.zeros((n_rows, length - gram + 1), dtype=np.uint64)
    for i in range(gram):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + rows[:, i : i + hashes.shape[1]].astype(np.uint64)
        hashes ^= hashes >> np.uint64(29)
    order = np.argsort(hashes, axis=1, kind="stable")  # equal hashes stay in order of position
    ranked = np.take_along_axis(hashes, order, axis=1)
    again = np.zeros_like(ranked, dtype=bool)
    again[:, 1:] = ranked[:, 1:] == ranked[:, :-1]
    repeated = np.zeros_like(again)
    np.put_along_axis(repeated, order, again, axis=1)
    for i in range(gram):
        looped[:, i : i + repeated.shape[1]] |= repeated
    return looped
