"""Subjects of proofs on the CPU: the kernels' path over small pairs, each launch computed by its reference."""

from __future__ import annotations

from typing import Any

import torch
from device_engines import CPU, ORDER, packed_pair
from tiny_engines import Pair

from eagle3core.geometry import BlockGeometry, DraftGeometry, RopeGeometry, TargetGeometry
from eagle3core.step.replay import EagerReplayer
from eagle3core.weights import PackedDraft, PackedTarget, pack_draft, pack_target
from lab.pairs.planted import PlantedGeometry, PlantedPair, TokenMap
from lab.parity.recording import PairUnderTest
from lab.probes.proofs.check import Check, Verdict
from lab.probes.proofs.plans import packed
from lab.probes.proofs.subject import Subject


def subject_of(name: str, target: PackedTarget, draft: PackedDraft, tokens: TokenMap | None = None) -> Subject:
    """Packed models whose engines run here."""
    settings: dict[str, Any] = {"prefill_chunk": 64}
    return Subject(name, target, draft, tokens, "sm_90a", EagerReplayer(), settings, ORDER)


def nano_subject(pair: Pair) -> Subject:
    """A pair on disk."""
    target, draft = packed_pair(pair)
    assert draft is not None
    return subject_of("nano", target, draft)


def subject_on_disk(pair: PairUnderTest) -> Subject:
    """The pair that Hugging Face reads."""
    return subject_of("on disk", *packed(pair))


def planted_subject(share: float = 0.7, dtype: torch.dtype = torch.bfloat16) -> Subject:
    """A planted pair of two layers over 1024 tokens."""
    block = BlockGeometry(256, 192, 4, 2, 64, 1e-5, RopeGeometry())
    target, draft = TargetGeometry(block, 2, 1024, 512), DraftGeometry(block, 256, 1024, 512, (0, 1, 2), False, True)
    return _planted("small", target, draft, share, dtype)


def one_layer_subject() -> Subject:
    """A planted pair of one narrow layer over 256 tokens, whose kernels an emulator runs in seconds."""
    block = BlockGeometry(128, 128, 2, 1, 64, 1e-5, RopeGeometry())
    target, draft = TargetGeometry(block, 1, 256, 512), DraftGeometry(block, 128, 256, 256, (0, 0, 0), False, True)
    return _planted("one layer", target, draft, 0.7, torch.bfloat16)


def _planted(name: str, target: TargetGeometry, draft: DraftGeometry, share: float, dtype: torch.dtype) -> Subject:
    pair = PlantedPair(PlantedGeometry(name, target, draft), share=share, dtype=dtype)
    made = pack_target(target, pair.target_weights.tensor, dtype=dtype, device=CPU, block=64, taps=draft.taps)
    pair.draft_weights.share_table(made.embedding)
    head = pack_draft(draft, pair.draft_weights.tensor, pair.tokens.draft_to_target, made, block=64)
    return subject_of(f"planted {name}", made, head, pair.tokens)


def verdicts(checks: list[Check]) -> dict[str, Verdict]:
    """What each check found, by name."""
    with torch.no_grad():
        return {check.name: check.judge() for check in checks}
