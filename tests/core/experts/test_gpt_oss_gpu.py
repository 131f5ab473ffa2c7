"""gpt-oss on a GPU's kernels: its attention at true size, and speculation to the bits of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agreeing_pairs import write_agreeing_pair
from device_engines import with_windows, write_nano_pair
from random_pairs import MXFP4
from tiny_engines import DYNAMIC_TREE, FIXED_TREE, Pair, accepted_counts, new_tokens, random_prompts, tokens_of

from eagle3core import Engine, EngineConfig, SpeculativeConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.kernels import proof
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.card import Case
from eagle3core.weights import pack_checkpoints

pytestmark = pytest.mark.gpu

HEADS: Case = {"dtype": "bf16", "dim": 64, "heads": 64, "kv_heads": 8, "sinks": True, "window": 128}
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3}, "dynamic tree": DYNAMIC_TREE, "fixed tree": FIXED_TREE,
}  # fmt: skip
LENGTHS = [3, 19, 150, 64, 300]


@pytest.mark.parametrize(
    "about",
    [
        {"prefix": (32741, 70), "tokens": 60, "paths": True},
        {"prefix": (9000, 3, -1, 127), "tokens": 8, "paths": True},
        {"prefix": (5000, 130), "tokens": 64, "tree": "chain"},
        {"prefix": (32000,), "tokens": 4, "tree": "chain"},
    ],
    ids=["tree of 60", "tree of 8", "chunk", "chain"],
)
def test_attention_of_gpt_oss_obeys_the_2x_rule_and_a_row_has_the_bits_of_plain_decoding(about: Case, gpu: Any) -> None:
    device, arch, execute = gpu
    case = {**HEADS, **about}
    inputs = CARD.example(case, proof.generator(6, device), device)
    outputs = proof.run(CARD, arch, case, inputs, execute, {})
    assert all(each.passes for each in proof.deviations(CARD, case, inputs, outputs))
    assert CARD.alone is not None
    assert CARD.row_of is not None
    for row in range(0, CARD.n_rows(case), 7):
        alone, own = CARD.alone(case, inputs, row)
        single = CARD.row_of(alone, own, proof.run(CARD, arch, alone, own, execute, {}), 0)["out"]
        assert proof.differing(single, CARD.row_of(case, inputs, outputs, row)["out"]) == 0, row


def windowed_engine(pair: Pair, fields: dict[str, Any] | None) -> Engine:
    """Its attention over layers without experts, which have kernels of their own."""
    target = load_target(pair[0], dtype=torch.bfloat16)
    head = load_draft(pair[1], target.geometry, dtype=torch.bfloat16) if fields else None
    packed, draft = pack_checkpoints(target, head, device=torch.device("cuda"), block=64)
    return Engine(with_windows(packed, (20, 0)), draft, config_of(pair, fields))


def whole_engine(pair: Pair, fields: dict[str, Any] | None) -> Engine:
    return Engine.from_pretrained(pair[0], config_of(pair, fields))


def config_of(pair: Pair, fields: dict[str, Any] | None) -> EngineConfig:
    spec = SpeculativeConfig(**{"model": str(pair[1]), **fields}) if fields else None
    return EngineConfig(session_len=512, max_batch_size=3, dtype="bfloat16", device="cuda", speculative_config=spec)


def gpt_oss_pair(folder: Path) -> Pair:
    return write_agreeing_pair(
        folder, family="gpt_oss", n_layers=4, hidden=128, heads=8, kv_heads=1, head_dim=64, ffn=64, vocab=256,
        draft_vocab=64, taps=(0, 2, 4), convention="input", eos=[], sliding_window=20, seed=5, dtype=torch.bfloat16,
        quantization_config=MXFP4,
    )  # fmt: skip


KINDS: dict[str, tuple[Callable[[Path], Pair], Callable[[Pair, dict[str, Any] | None], Engine]]] = {
    "its attention alone": (lambda folder: write_nano_pair(folder, seed=5, bias=True), windowed_engine),
    "experts in MXFP4": (gpt_oss_pair, whole_engine),
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token_on_the_kernels(kind: str, tmp_path: Path) -> None:
    write, engine = KINDS[kind]
    pair, prompts = write(tmp_path), random_prompts(LENGTHS, n_vocab=256)
    plain = engine(pair, None)
    if plain.backend.path != "kernels":
        pytest.skip(f"runs in plain torch: {plain.backend.path_reason}")
    expected = tokens_of(plain.generate(prompts, new_tokens(48)))
    for name, fields in DRAFTS.items():
        responses = engine(pair, fields).generate(prompts, new_tokens(48))
        assert tokens_of(responses) == expected, name
        assert len(accepted_counts(responses)) > 1, name
