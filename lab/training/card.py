"""The card of a pair, what it was made of and what it is worth: `card.json` for programs, `README.md` for readers."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from lab.training.evaluation import Acceptance
from lab.training.sizes import PairSize

CARD_SCHEMA = 1


@dataclass(frozen=True)
class Data:
    """What it was trained on: source, interpreter version of a standard library, hash, tokens by split."""

    source: str
    python: str
    sha256: str
    tokens: dict[str, int]


@dataclass(frozen=True)
class Losses:
    """Held-out losses in nats a token: of the saved target, and of a 5-gram over the same tokens."""

    target: float
    five_gram: float


def make_card(
    size: PairSize,
    seed: int,
    data: Data,
    losses: Losses,
    stages: dict[str, dict[str, Any]],
    acceptance: Acceptance,
    device: str,
) -> dict[str, Any]:
    """The card as a JSON object.

    Args:
        size: geometry and plan.
        seed: of the run.
        data: the corpus.
        losses: held-out losses.
        stages: outcome of each stage: parameters, steps, seconds, best validation values.
        acceptance: on the held-out prompts.
        device: what it was trained on, in words.
    """
    return {
        "card": CARD_SCHEMA,
        "size": asdict(size),
        "seed": seed,
        "device": device,
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        "data": asdict(data),
        "held_out_loss_nats_per_token": asdict(losses),
        "stages": stages,
        "acceptance": asdict(acceptance),
    }


def write_card(card: dict[str, Any], directory: Path) -> None:
    """`card.json` and `README.md` in the directory of the pair."""
    (directory / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    (directory / "README.md").write_text(_readme(card), encoding="utf-8")


def shown(value: float | None) -> str:
    """Three decimals, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.3f}"


def _readme(card: dict[str, Any]) -> str:
    size, data, losses = card["size"], card["data"], card["held_out_loss_nats_per_token"]
    chain, stages, versions = card["acceptance"], card["stages"], card["versions"]
    positions = ", ".join(shown(share) for share in chain["by_position"])
    library = f" of Python {data['python']}" if data["python"] else ""
    tokens = ", ".join(f"{count:,} {split}" for split, count in data["tokens"].items())
    return f"""# A {size["name"]} EAGLE-3 pair

A Llama-architecture target and an EAGLE-3 head for it, trained by `eagle3lab train --size {size["name"]}`.
What it shows about speed or acceptance is about this pair, not about EAGLE-3 on large models.

| | |
|---|---|
| target | {stages["target"]["parameters"]:,} parameters: {size["layers"]} layers, hidden {size["hidden"]}, \
{size["heads"]} heads ({size["kv_heads"]} key/value) of {size["head_dim"]}, feed-forward {size["ffn"]}, \
vocabulary {size["vocab"]} |
| draft | {stages["draft"]["parameters"]:,} parameters: one layer, feed-forward {size["draft_ffn"]}, \
vocabulary {size["draft_vocab"]}, trained on {size["ttt_steps"]} chained steps |
| text | {data["source"]}{library}; tokens: {tokens} |
| sha256 of the text | `{data["sha256"]}` |
| steps | target {stages["target"]["steps"]:,} (best at {stages["target"]["best"]["step"]:,}), \
draft {stages["draft"]["steps"]:,} (best at {stages["draft"]["best"]["step"]:,}) |
| trained on | {card["device"]}, seed {card["seed"]}; Python {versions["python"]}, torch {versions["torch"]}, \
transformers {versions["transformers"]} |
| held-out loss, nats a token | target **{losses["target"]:.3f}**, interpolated 5-gram {losses["five_gram"]:.3f} |

Greedy acceptance of a chain of {chain["n_drafts"]} on {chain["n_prompts"]} held-out prompts, {chain["n_tokens"]} \
tokens each, by teacher forcing while training
(bonus token counted; `eagle3lab nightly` measures it by decoding):

| | |
|---|---|
| acceptance length outside loops | **{shown(chain["length_outside_loops"])}** |
| acceptance length of all steps | {shown(chain["length"])} |
| first 1, 2, .. drafts all accepted | {positions} |
| written tokens in a repeated 16-gram | {100 * chain["looped_share"]:.1f} % |
| written tokens inside the draft vocabulary | {100 * chain["coverage"]:.1f} % |

`losses.jsonl` holds the loss curves, `card.json` these figures, `prompts.jsonl` the held-out prompts.
"""
