"""Peers decode the planted tokens over the same weights, agree with each other, and one that fails says why."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from rings import exhaustive_but, slow_but

from lab.errors import RunFailed
from lab.pairs.planted import GEOMETRIES, PlantedPair, share_for_length
from lab.probes.bench.peers.compiled_torch import COMPILE_LIMIT_S, CompiledTorch
from lab.probes.bench.peers.fused import fuse_draft, fuse_target
from lab.probes.bench.peers.hf_static import HFStatic
from lab.probes.bench.peers.plain_torch import PlainTorch
from lab.probes.bench.peers.sdpa import folded, grouped
from lab.probes.bench.run import Contender

pytestmark = pytest.mark.reference
K = 3


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def nano() -> PlantedPair:
    """Three tokens a step at three drafts."""
    return PlantedPair("nano", share=share_for_length(3.0, K), dtype=torch.float32)


@pytest.mark.parametrize("k", slow_but([0, 3], [0, 1, 3, 7]))
def test_the_plain_torch_step_commits_the_planted_tokens_as_often_as_the_dial_says(nano: PlantedPair, k: int) -> None:
    target = fuse_target(nano.target_weights, nano.geometry.target.n_layers)
    draft = fuse_draft(nano.draft_weights, target, nano.tokens.draft_to_target)
    first = torch.tensor([prompt[-1] for prompt in nano.prompts(8, 2)])
    peer = PlainTorch(
        target, draft, nano.geometry.target, nano.geometry.draft, k=k, context=24, first=first,
        successor=nano.tokens.successor, n_steps=25,
    )  # fmt: skip
    for _ in range(2):
        found = peer.run()
        assert found.n_wrong == 0
        assert found.step_ms > 0
    expected = sum(nano.tokens.share**i for i in range(k + 1))
    assert found.tokens_per_step == pytest.approx(expected, rel=0.1)
    assert peer.facts()["attention"]


def test_a_peer_that_decodes_other_tokens_is_found_out(nano: PlantedPair) -> None:
    target = fuse_target(nano.target_weights, nano.geometry.target.n_layers)
    other = PlantedPair("nano", share=0.5, seed=9, dtype=torch.float32)
    first = torch.tensor([prompt[-1] for prompt in nano.prompts(3, 2)])
    given: dict[str, Any] = {"context": 8, "first": first, "n_steps": 4}
    geometry = nano.geometry.target
    wrong = HFStatic(target, geometry, successor=other.tokens.successor, **given)
    assert wrong.run().n_wrong == 3
    unknown = HFStatic(target, geometry, successor=None, **given)
    assert unknown.run().n_wrong is None


def test_hugging_face_reads_the_same_weights_and_turns_by_the_same_angles(nano: PlantedPair) -> None:
    geometry = GEOMETRIES["nano"].target
    target = fuse_target(nano.target_weights, geometry.n_layers)
    first = torch.tensor([prompt[-1] for prompt in nano.prompts(2, 2)])
    peer = HFStatic(target, geometry, context=16, first=first, successor=nano.tokens.successor, n_steps=6)
    assert peer.run().n_wrong == 0
    assert peer.run().n_wrong == 0, "a second round starts where the first did"
    layer = peer.model.model.layers[1]
    assert (
        layer.self_attn.k_proj.weight.data_ptr()
        == target.layers[1].parts(geometry.block)["self_attn.k_proj.weight"].data_ptr()
    )
    plain = PlainTorch(
        target, None, geometry, nano.geometry.draft, k=0, context=16, first=first, successor=None, n_steps=1
    )
    assert torch.equal(peer.model.model.rotary_emb.inv_freq, plain.stack.frequencies)


def test_plain_torch_and_hugging_face_give_the_same_logits_over_the_same_cache(nano: PlantedPair) -> None:
    geometry = GEOMETRIES["nano"].target
    target = fuse_target(nano.target_weights, geometry.n_layers)
    first = torch.tensor([prompt[-1] for prompt in nano.prompts(2, 2)])
    given: dict[str, Any] = {"context": 16, "first": first, "successor": None, "n_steps": 1}
    theirs = HFStatic(target, geometry, **given)
    ours = PlainTorch(target, None, geometry, nano.geometry.draft, k=0, **given)
    for i, layer in enumerate(theirs.cache.layers):
        ours.stack.k[i][:, :, :16] = layer.keys[:, :, :16]
        ours.stack.v[i][:, :, :16] = layer.values[:, :, :16]
    theirs.run()
    ours.run()
    for i, layer in enumerate(theirs.cache.layers):  # what the step wrote went through every layer below
        assert torch.allclose(ours.stack.k[i][:, :, 16], layer.keys[:, :, 16], atol=1e-4)
        assert torch.allclose(ours.stack.v[i][:, :, 16], layer.values[:, :, 16], atol=1e-4)


def test_both_forms_of_attention_agree() -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 8, 16, generator=random)
    k, v = (torch.randn(2, 2, 11, 16, generator=random) for _ in range(2))
    assert torch.allclose(grouped(q, k, v), folded(q, k, v), atol=1e-5)


def test_a_peer_that_fails_gives_its_reason_and_is_not_asked_again() -> None:
    class Failing:
        name = "failing"
        n_calls = 0

        def run(self) -> Any:
            self.n_calls += 1
            raise RuntimeError("no kernel image\nand a long story")

        def facts(self) -> dict[str, Any]:
            return {}

    peer = Failing()
    contender = Contender(lambda: peer)
    assert contender.once() is None
    assert contender.once() is None
    assert contender.reason == "RuntimeError: no kernel image"
    assert peer.n_calls == 1


# -- rows


# -- the compiled step


def compiled(nano: PlantedPair, k: int, **more: Any) -> CompiledTorch:
    target = fuse_target(nano.target_weights, nano.geometry.target.n_layers)
    draft = fuse_draft(nano.draft_weights, target, nano.tokens.draft_to_target)
    first = torch.tensor([prompt[-1] for prompt in nano.prompts(2, 2)])
    return CompiledTorch(
        target, draft, nano.geometry.target, nano.geometry.draft, k=k, context=24, first=first,
        successor=nano.tokens.successor, n_steps=25, **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("k", exhaustive_but([3], [0, 3]))
def test_the_compiled_step_commits_the_planted_tokens_and_serves_all_layers_by_one_form(
    nano: PlantedPair, k: int
) -> None:
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    peer = compiled(nano, k)
    for _ in range(2):
        found = peer.run()
        assert found.n_wrong == 0
    assert found.tokens_per_step == pytest.approx(sum(nano.tokens.share**i for i in range(k + 1)), rel=0.2)
    # Opening, between, closing; with drafts the two of a draft pass, of the first and of later ones, and acceptance.
    assert counters["stats"]["unique_graphs"] == (8 if k else 3)
    facts = peer.facts()
    assert facts["compiled"] is True
    assert 0 < facts["compile_s"] < COMPILE_LIMIT_S


def test_a_compiler_that_takes_too_long_ends_with_its_time_and_the_remedy(nano: PlantedPair) -> None:
    with pytest.raises(RunFailed, match="before the step was whole"):
        compiled(nano, 0, limit_s=0.0)
