"""A number for the bits of every row of every stage, by request, position and stage of the target.

Passes differ between runs: a prompt is read in chunks, a step verifies one token, a chain or a tree. What they have in
common is the token at a position, so rows are filed under that: of a step's nodes those on the accepted path count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3core import Engine
from eagle3core.config import GenerationConfig
from eagle3core.request import own_tokens, without_errors
from lab.errors import ExperimentError, NotComparable
from lab.parity.by_request import RequestTrace
from lab.parity.recording import check_prompts, traced

FORM = "eagle3lab bits 1"
_SEED = 20260101


@dataclass(frozen=True)
class Hashes:
    """One request's rows.

    Attributes:
        prompt, tokens: its token ids and the generated ones.
        stages: in the order in which a pass runs them.
        table: `[stages, positions]` int64; 0 where a run computed no such row.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stages: tuple[str, ...]
    table: Tensor


class HashTrace(RequestTrace):
    """Keeps token ids as they are, and of every other row of the target's stages one number."""

    def __init__(self, steps: int, rounds: torch.dtype | None = None) -> None:
        super().__init__(steps)
        self._rounds = rounds
        self._weights: dict[int, Tensor] = {}

    def _put(self, tensors: dict[str, Tensor], key: str, rows: Tensor) -> None:
        if not rows.is_floating_point():
            super()._put(tensors, key, rows)
        elif "target." in key:
            super()._put(tensors, key, self._hashed(rows.detach()))

    def _hashed(self, rows: Tensor) -> Tensor:
        """`[n]` int64 of `rows: [n, ...]`: sums of 16-bit words times odd weights, modulo 2^64, never 0."""
        rows = rows if self._rounds is None else rows.to(self._rounds)
        words = rows.reshape(len(rows), -1).contiguous().view(torch.int16).long()
        width = words.shape[1]
        if width not in self._weights:
            made = torch.randint(-(2**62), 2**62, (width,), generator=torch.Generator().manual_seed(_SEED))
            self._weights[width] = (made * 2 + 1).to(words.device)
        found = ((words + 40503) * self._weights[width]).sum(1)
        return torch.where(found == 0, 1, found)


def record_hashes(
    engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int, *, rounds: torch.dtype | None = None
) -> list[Hashes]:
    """The rows of every prompt and of `n_tokens` generated after it, each rounded to `rounds` first if given.

    Raises:
        ExperimentError: no prompt, or one of fewer than two tokens. RequestFailed: a request ended by a fault.
    """
    check_prompts(prompts)
    trace = HashTrace(n_tokens, rounds)
    with traced(engine, trace):
        responses = engine.generate([list(prompt) for prompt in prompts], GenerationConfig(n_tokens, ignore_eos=True))
    answers = [tuple(response.token_ids) for response in own_tokens(without_errors(responses))]
    return [
        filed(tuple(prompt), tokens, tensors)
        for prompt, tokens, tensors in zip(prompts, answers, trace.requests, strict=True)
    ]


def filed(prompt: tuple[int, ...], tokens: tuple[int, ...], tensors: dict[str, Tensor]) -> Hashes:
    """Rows of passes as rows of positions."""
    n_prompt, n = len(prompt), len(prompt) + len(tokens)
    stages: dict[str, Tensor] = {}

    def put(stage: str, positions: Sequence[int], rows: Tensor) -> None:
        row = stages.setdefault(stage, torch.zeros(n, dtype=torch.int64))
        kept = [i for i, position in enumerate(positions) if position < n]
        row[[positions[i] for i in kept]] = rows[kept]

    for name in (name for name in tensors if name.startswith("prefill/target.")):
        rows = tensors[name]  # all positions, those after a cached beginning, or the last one alone
        put(name.removeprefix("prefill/"), range(n_prompt - len(rows), n_prompt), rows)
    root, step = n_prompt, 0
    while f"step{step}/accept.tokens" in tensors:
        path = accepted_path(tensors, f"step{step}")
        verify = f"step{step}/verify/"
        for name in (name for name in tensors if name.startswith(f"{verify}target.")):
            put(name.removeprefix(verify), range(root, root + len(path)), tensors[name][path])
        root, step = root + len(path), step + 1
    # The norm is read from what the head leaves, and comes before it.
    order = sorted(stages, key=lambda stage: (stage == "target.head", stage == "target.norm"))
    return Hashes(prompt, tokens, tuple(order), torch.stack([stages[stage] for stage in order]))


def accepted_path(tensors: dict[str, Tensor], step: str) -> list[int]:
    """Nodes of a step that were accepted, the root first."""
    accepted = [int(token) for token in tensors[f"{step}/accept.tokens"] if token >= 0][:-1]  # without the bonus
    if not accepted:
        return [0]
    tokens, parents = (tensors[f"{step}/tree.{name}"].tolist() for name in ("tokens", "parents"))
    path = [0]
    for token in accepted:
        path.append(next(i for i, of in enumerate(tokens) if of == token and parents[i] == path[-1]))
    return path


def write_hashes(path: Path, hashes: Sequence[Hashes]) -> None:
    """A safetensors file that `read_hashes` reads."""
    about = [{"prompt": one.prompt, "tokens": one.tokens, "stages": one.stages} for one in hashes]
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = {f"prompt{i}": one.table.contiguous() for i, one in enumerate(hashes)}
    save_file(tables, path, metadata={"form": FORM, "about": json.dumps(about)})


def read_hashes(path: Path) -> list[Hashes]:
    """What `write_hashes` wrote.

    Raises:
        ExperimentError: no such file. NotComparable: another kind of file.
    """
    if not path.is_file():
        raise ExperimentError(f"{path} is not there", "a file that --save wrote", "name one, or a shape")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("form") != FORM:
                raise NotComparable(f"{path.name} holds no hashes", FORM, "write it with --save")
            about = json.loads(metadata["about"])
            return [
                Hashes(tuple(one["prompt"]), tuple(one["tokens"]), tuple(one["stages"]), file.get_tensor(f"prompt{i}"))
                for i, one in enumerate(about)
            ]
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise NotComparable(f"{path.name} cannot be read: {error}", FORM, "write it with --save") from error
