"""What a head's variant adds to a step: launches of cards that exist, and nothing at all to a plain head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from device_engines import device_engine, device_runner, write_nano_pair
from emulated_steps import LANES, MEANING, check_first_step
from layout_files import Changes, read_head, write_head
from rings import exhaustive_but
from tiny_engines import Pair, new_tokens, random_prompts

from eagle3core.config import EngineConfig
from eagle3core.geometry import HeadVariant
from eagle3core.speculative import SpeculativeConfig
from eagle3core.step.kernel_limits import why_plain_torch
from eagle3core.step.tree import GrownTree

pytestmark = pytest.mark.emulated

NORM, TAKE, MAP, JOIN, ATTEND = "rms_norm", "take_rows", "gemm", "draft_input", "attention"
ROPE = "rope"
PLAIN = {"draft.fc": [TAKE, MAP], "draft.qkv": [JOIN, MAP], "draft.attn": [ATTEND, MAP], "draft.mlp": [MAP, MAP]}


def norms(head: Changes) -> None:
    head.flags(norm_before_residual=True, norm_before_fc=True, return_hidden_post_norm=True)
    head.norm_over_all()


def each(head: Changes) -> None:
    head.norm_over_each(("fc_norm.0", "fc_norm.1"))


def last_state(head: Changes) -> None:
    head.flags(use_aux_hidden_state=False)
    head.drop("fc.weight", "midlayer.hidden_norm.weight")


def normed_and_near(head: Changes) -> None:
    head.norms_of_heads()
    head.flags(layer_types=["sliding_attention"], sliding_window=7)


VARIANTS: dict[str, tuple[Callable[[Changes], object], dict[str, list[str]]]] = {
    "plain": (lambda head: None, {}),
    "three norms more": (
        norms, {"draft.fc": [TAKE, NORM, MAP], "draft.attn": [NORM, ATTEND, MAP], "draft.mlp": [MAP, MAP, NORM]}
    ),
    "a norm of each tap": (each, {"draft.fc": [TAKE, NORM, MAP]}),
    "norms of heads": (Changes.norms_of_heads, {"draft.qkv": [JOIN, MAP, ROPE]}),
    "norms of heads in a window": (normed_and_near, {"draft.qkv": [JOIN, MAP, ROPE]}),
    "the last state": (last_state, {"draft.fc": [TAKE, NORM], "draft.qkv": [JOIN, TAKE, MAP]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_nano_pair(tmp_path_factory.mktemp("nano"), seed=5, n_layers=1, taps=(0, 1), vocab=64)


def varied(pair: Pair, folder: Path, change: Callable[[Changes], object]) -> Pair:
    config, weights = read_head(pair[1])
    changes = Changes(config, weights, 64, 64)
    change(changes)
    stored = {name: tensor.to(weights["norm.weight"].dtype) if tensor.is_floating_point() else tensor
              for name, tensor in weights.items()}  # fmt: skip
    return pair[0], write_head(folder / "head", config, stored)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_adds_its_norms_and_a_plain_head_has_none(plain_pair: Pair, tmp_path: Path, name: str) -> None:
    change, differing = VARIANTS[name]
    runner = device_runner(varied(plain_pair, tmp_path, change), 3, MEANING, n_slots=1, chunk=16)
    ops: dict[str, list[str]] = {}
    for stage in runner.programs[1]:
        if stage.name in PLAIN:
            ops.setdefault(stage.name, [call.op for call in stage.calls])
            assert all(call.launches for call in stage.calls), stage.name
    assert ops == {**PLAIN, **differing}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    exhaustive_but(
        ["three norms more", "norms of heads in a window"],
        ["three norms more", "a norm of each tap", "norms of heads in a window", "the last state"],
    ),
)
def test_kernels_and_their_meaning_draft_alike(plain_pair: Pair, tmp_path: Path, name: str) -> None:
    pair = varied(plain_pair, tmp_path, VARIANTS[name][0])
    prompt, n = random_prompts([6], n_vocab=64, seed=2), new_tokens(4)
    lanes, meaning = (device_engine(pair, 2, by, n_slots=1, chunk=16).generate(prompt, n)[0] for by in (LANES, MEANING))
    assert lanes.token_ids == meaning.token_ids
    assert lanes.req_metrics == meaning.req_metrics


@pytest.mark.slow
def test_kernels_and_their_meaning_grow_one_tree_where_beams_are_taken_by_a_variant(
    plain_pair: Pair, tmp_path: Path
) -> None:
    def norms_of_last_state(head: Changes) -> None:
        head.flags(norm_before_residual=True, return_hidden_post_norm=True, use_aux_hidden_state=False)
        head.drop("fc.weight")

    for i, change in enumerate((last_state, norms_of_last_state, normed_and_near)):
        check_first_step(varied(plain_pair, tmp_path / str(i), change), GrownTree(2, 2, 5))


def test_an_activation_that_the_kernels_lack_is_computed_by_plain_torch(plain_pair: Pair) -> None:
    runner = device_runner(plain_pair, 1, MEANING, n_slots=1, chunk=16)
    assert runner.draft is not None
    config = EngineConfig(prefill_chunk=64, speculative_config=SpeculativeConfig(model="head"))
    draft = dataclasses.replace(runner.draft.geometry, variant=HeadVariant(activation="gelu"))
    reason = why_plain_torch(runner.target.geometry, draft, config, torch.bfloat16)
    assert reason is not None
    assert reason.startswith("the activation is gelu; the kernels take silu")
