"""Our engine against what the official EAGLE-3 code computed on the same random weights (tests/data/golden)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from places import GOLDEN
from torch import Tensor

from eagle3core.checkpoint import load_target
from eagle3core.config import EngineConfig, GenerationConfig, SpeculativeConfig
from eagle3core.decode.kvcache import PagedCache
from eagle3core.engine import Engine, Response
from eagle3core.kernels.layer.rms_norm import rms_norm_reference
from eagle3core.kernels.tree.accept import accept_greedy_reference, argmax_reference
from eagle3core.model.block import Pass
from eagle3core.model.target import TargetModel, TargetOutput
from eagle3core.step.tree import FlatTree, tree_from_mask
from eagle3core.trace import RecordingTrace, Trace

pytestmark = pytest.mark.reference

TOLERANCE = 1e-5
ROUNDS = (0, 1)
DEPTH = 5
Golden = dict[str, Tensor]


def load(name: str) -> Golden:
    with np.load(GOLDEN / name) as archive:
        return {key: torch.from_numpy(archive[key]) for key in archive.files}


class CacheTrace(RecordingTrace):
    """Also keeps the draft's committed keys and values of slot 0 as every verification begins."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine | None = None
        self.committed: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        if name == "verify" and self.engine is not None and self.engine.state.draft_cache is not None:
            state = self.engine.state
            n_entries = int(state.draft_lengths[0])
            k, v = state.draft_cache.view(torch.tensor([0])).read(0, 0, n_entries)
            self.committed.append((k.transpose(0, 1)[None].clone(), v.transpose(0, 1)[None].clone()))
        with super().scope(name):
            yield


@pytest.fixture(scope="module")
def chain() -> Golden:
    return load("official_chain.npz")


@pytest.fixture(scope="module")
def ours(chain: Golden) -> tuple[CacheTrace, Response, Engine]:
    spec = SpeculativeConfig(model=str(GOLDEN / "draft"), num_speculative_tokens=DEPTH)
    config = EngineConfig(
        session_len=64, max_batch_size=1, block_size=8, prefill_chunk=64, dtype="float32", device="cpu",
        speculative_config=spec,
    )  # fmt: skip
    trace = CacheTrace()
    engine = Engine.from_pretrained(GOLDEN / "target", config, trace=trace)
    trace.engine = engine
    n_tokens = len(chain["tokens_ea"])
    settings = GenerationConfig(max_new_tokens=n_tokens, ignore_eos=True)
    return trace, engine.generate([chain["prompt_ids"].tolist()], settings)[0], engine


def draft_rows(trace: RecordingTrace, round_: int, level: int, stage: str) -> Tensor:
    """Our rows of the official draft forward `level` of a round; its first one includes our draft prefill."""
    if level:
        return trace.tensors[f"step{round_}/chain{level}/draft.{stage}"]
    rows = trace.tensors[f"step{round_}/extend/draft.{stage}"]
    before = trace.tensors.get(f"prefill/draft.{stage}") if round_ == 0 else None
    return rows if before is None else torch.cat([before, rows])


def assert_within(ours: Tensor, official: Tensor, what: str) -> None:
    official = official.reshape(ours.shape)
    error = float((ours - official).abs().max())
    assert error <= TOLERANCE, f"{what}: largest difference {error:.3g}"


def test_greedy_tokens_equal_those_of_the_official_code(
    chain: Golden, ours: tuple[CacheTrace, Response, Engine]
) -> None:
    assert ours[1].token_ids == chain["tokens_ea"].tolist() == chain["tokens_hf"].tolist()


def test_accepted_lengths_equal_those_of_the_official_code(
    chain: Golden, ours: tuple[CacheTrace, Response, Engine]
) -> None:
    steps = ours[1].req_metrics.steps
    assert len(steps) >= len(ROUNDS)
    assert [step.n_accepted for step in steps] == chain["accept_lens"][: len(steps)].tolist()


@pytest.mark.parametrize("round_", ROUNDS)
def test_drafted_tokens_and_positions_equal_those_of_the_official_chain(
    chain: Golden, ours: tuple[CacheTrace, Response, Engine], round_: int
) -> None:
    trace = ours[0]
    assert trace.tensors[f"step{round_}/tree.tokens"].tolist() == chain[f"r{round_}/tree/tokens"].flatten().tolist()
    for level in range(DEPTH):
        key = f"r{round_}/s{level}"
        assert draft_rows(trace, round_, level, "tokens").tolist() == chain[f"{key}/ids"].flatten().tolist()
        if level:
            assert draft_rows(trace, round_, level, "positions").tolist() == chain[f"{key}/pos"].tolist()


def test_the_prompts_taps_and_logits_agree_with_the_official_capture(
    chain: Golden, ours: tuple[CacheTrace, Response, Engine]
) -> None:
    tensors = ours[0].tensors
    assert_within(tensors["prefill/target.taps"], chain["prefill/aux"], "taps")
    assert_within(tensors["prefill/target.head"], chain["prefill/logits"][0, -1:], "logits")
    assert_within(tensors["prefill/target.7.mlp"], chain["prefill/final_norm_in"], "input of the final norm")
    assert_within(tensors["prefill/target.norm"], chain["prefill/final_norm_out"][0, -1:], "final norm")
    assert int(tensors["first_token"]) == int(chain["prefill/token"])


@pytest.mark.parametrize("round_", ROUNDS)
def test_verification_agrees_with_the_official_logits_and_taps(
    chain: Golden, ours: tuple[CacheTrace, Response, Engine], round_: int
) -> None:
    tensors, official = ours[0].tensors, chain[f"r{round_}/verify/node_logits"][0]
    logits = tensors[f"step{round_}/verify/target.head"]
    assert_within(logits, official, "node logits")
    assert torch.equal(logits.argmax(-1), official.argmax(-1))
    assert_within(tensors[f"step{round_}/verify/target.taps"], chain[f"r{round_}/verify/aux"], "taps of the nodes")


@pytest.mark.parametrize("round_", ROUNDS)
@pytest.mark.parametrize("level", range(DEPTH))
def test_every_draft_tensor_agrees_with_the_official_one(
    chain: Golden, ours: tuple[CacheTrace, Response, Engine], round_: int, level: int
) -> None:
    trace, _, engine = ours
    draft = engine.draft
    assert draft is not None
    key = f"r{round_}/s{level}"
    layer = f"{key}/midlayer"

    def rows(stage: str) -> Tensor:
        return draft_rows(trace, round_, level, stage)

    width = rows("fc").shape[-1]
    projections = [chain[f"{layer}.self_attn.{name}_proj/out"] for name in "qkv"]
    residual = rows("fc") + rows("attn")
    post_norm = rms_norm_reference(residual, draft.mlp_norm, draft.geometry.block.rms_norm_eps)
    pairs = {
        "fc" if level == 0 else "state fed back": (
            rows("fc"), chain[f"{key}/fc/out"] if level == 0 else chain[f"{key}/in_hidden"]
        ),
        "embedding norm": (rows("concat")[:, :width], chain[f"{layer}.input_layernorm/out"]),
        "hidden norm": (rows("concat")[:, width:], chain[f"{layer}.hidden_norm/out"]),
        "q, k, v": (rows("qkv"), torch.cat(projections, dim=-1)),
        "attention": (rows("attn"), chain[f"{layer}.self_attn.o_proj/out"]),
        "post-attention norm": (post_norm, chain[f"{layer}.post_attention_layernorm/out"]),
        "mlp": (rows("mlp"), chain[f"{layer}.mlp.down_proj/out"]),
        "layer": (rows("feedback"), chain[f"{layer}/out"]),
        "final norm": (rows("norm"), chain[f"{key}/norm/out"]),
        "head": (rows("head"), chain[f"{key}/lm_head/out"]),
    }  # fmt: skip
    for what, (mine, official) in pairs.items():
        assert_within(mine, official, f"{what} of {key}")


@pytest.mark.parametrize("round_", ROUNDS)
def test_the_committed_draft_cache_equals_the_official_one(
    chain: Golden, ours: tuple[CacheTrace, Response, Engine], round_: int
) -> None:
    k, v = ours[0].committed[round_]
    assert k.shape == chain[f"r{round_}/draft_k"].shape
    assert_within(k, chain[f"r{round_}/draft_k"], "keys")
    assert_within(v, chain[f"r{round_}/draft_v"], "values")


class TreeCase:
    """The recorded trees, verified one after the other by our target over its own cache."""

    def __init__(self) -> None:
        self.golden = load("official_tree.npz")
        checkpoint = load_target(GOLDEN / "target", dtype=torch.float32)
        self.target = TargetModel(checkpoint, taps=checkpoint.geometry.default_taps)
        self.cache = PagedCache(
            checkpoint.geometry.block, n_layers=checkpoint.geometry.n_layers, n_slots=1, max_tokens=64, block_size=8,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        self.cache.reserve(0, 64)
        prompt = self.golden["prompt_ids"]
        self.prefill = self.forward(prompt, FlatTree(tuple(range(-1, len(prompt) - 1))), 0)

    def forward(self, tokens: Tensor, tree: FlatTree, start: int) -> TargetOutput:
        at = Pass(
            positions=(start + tree.depths)[None],
            prefix_lens=torch.tensor([start]),
            mask=tree.mask[None],
            valid=torch.ones(1, tree.n_nodes, dtype=torch.bool),
        )
        return self.target.forward(tokens.reshape(1, -1), at, self.cache.view(torch.tensor([0])), Trace())


@pytest.fixture(scope="module")
def tree_case() -> TreeCase:
    return TreeCase()


@pytest.fixture(scope="module")
def verified(tree_case: TreeCase) -> list[TargetOutput]:
    """Both rounds in order; round 0 accepts nothing, so round 1 starts one token later."""
    golden, start = tree_case.golden, len(tree_case.golden["prompt_ids"])
    outputs = []
    for round_ in ROUNDS:
        tree = tree_from_mask(golden[f"r{round_}/tree/mask"][0, 0])
        outputs.append(tree_case.forward(golden[f"r{round_}/tree/tokens"], tree, start))
        start += 1 + int(golden[f"r{round_}/verify/accept_len"])
    return outputs


def test_the_trees_prompt_taps_agree_with_the_official_capture(tree_case: TreeCase) -> None:
    assert_within(tree_case.prefill.taps, tree_case.golden["prefill/aux"], "taps")
    assert tree_case.prefill.logits is not None
    assert int(tree_case.prefill.logits[0, -1].argmax()) == int(tree_case.golden["prefill/token"])


@pytest.mark.parametrize("round_", ROUNDS)
def test_positions_and_paths_recovered_from_the_recorded_mask_are_the_official_ones(
    tree_case: TreeCase, round_: int
) -> None:
    golden = tree_case.golden
    tree = tree_from_mask(golden[f"r{round_}/tree/mask"][0, 0])
    assert tree.depths.tolist() == golden[f"r{round_}/tree/pos"].tolist()
    assert tree.paths.tolist() == golden[f"r{round_}/tree/retrieve"].tolist()


@pytest.mark.parametrize("round_", ROUNDS)
def test_node_logits_and_taps_of_the_recorded_tree_agree_in_one_pass(
    tree_case: TreeCase, verified: list[TargetOutput], round_: int
) -> None:
    golden, output = tree_case.golden, verified[round_]
    official = golden[f"r{round_}/verify/node_logits"]
    assert output.logits is not None
    assert_within(output.logits, official, "node logits")
    assert torch.equal(output.logits.argmax(-1), official.argmax(-1))
    assert_within(output.taps, golden[f"r{round_}/verify/aux"], "taps of the nodes")


@pytest.mark.parametrize("round_", ROUNDS)
def test_acceptance_of_the_recorded_tree_is_the_official_one(
    tree_case: TreeCase, verified: list[TargetOutput], round_: int
) -> None:
    golden, key = tree_case.golden, f"r{round_}"
    tree = tree_from_mask(golden[f"{key}/tree/mask"][0, 0])
    tokens, logits = golden[f"{key}/tree/tokens"].reshape(1, -1), verified[round_].logits
    assert logits is not None
    candidates = torch.where(tree.paths >= 0, tokens[0][tree.paths.clamp_min(0)], -1)
    recorded = golden[f"{key}/verify/candidates"]
    assert torch.equal(candidates[tree.paths >= 0], recorded[tree.paths >= 0])
    acceptance = accept_greedy_reference(tokens, argmax_reference(logits), torch.tensor(tree.parents), tree.depths)
    n_accepted = int(acceptance.n_accepted)
    assert n_accepted == int(golden[f"{key}/verify/accept_len"])
    best = golden[f"{key}/tree/retrieve"][int(golden[f"{key}/verify/best"])]
    assert acceptance.path[0, : n_accepted + 1].tolist() == best[: n_accepted + 1].tolist()
    if round_ + 1 in ROUNDS:
        assert int(acceptance.bonus) == int(golden[f"r{round_ + 1}/tree/tokens"][0, 0])
