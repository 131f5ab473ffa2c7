"""Engines with one known bug each in how they run a head, and the lamp that should name it."""

from __future__ import annotations

from pathlib import Path

from lab.doctor.draft.case import Case
from lab.pairs import shipped_pair
from lab.pairs.prompts import prompts_for

# By lamp: bugs of `lab.parity.faults`; the first of each stands for it, the others are its variants.
ENGINE_FAULTS = {
    "chunk_seam": ("chunk_positions", "chunk_boundary_token"),
    "stale_prefix": ("found_without_draft_rows", "stale_draft_rows"),
    "own_states": ("stale_draft_kv", "stale_draft_keys", "stale_draft_values"),
    "padding": ("padding_features", "padding_lengths"),
    "company": ("batch_features", "batch_positions", "batch_lengths", "batch_feedback", "refilled_keys"),
    "tree_below_chain": ("tree_parents", "tree_states", "compacted_rows"),
    "as_distribution": ("drawn_as_certain", "likeliest_as_drawn"),
    "greedy_text": ("verify_positions",),
}
H200_SPEED = Path(__file__).parent.parent.parent / "reports" / "reference" / "h200" / "speed.jsonl"


def broken_engine(fault: str, *, n_prompts: int = 8, max_new_tokens: int = 64) -> Case:
    """The shipped pair in an engine with that bug; without a name in a right one."""
    pair = shipped_pair()
    prompts, _ = prompts_for(pair.target, limit=n_prompts, max_tokens=200)
    return Case(pair.target, pair.draft, tuple(prompts), max_new_tokens=max_new_tokens, device="cpu", fault=fault)
