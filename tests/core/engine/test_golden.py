"""Our engine against what the official EAGLE-3 code computed on the same random weights (tests/data/golden)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from derived_stages import DerivedToo
from places import GOLDEN
from tiny_engines import tree_runner
from torch import Tensor
from tree_arrays import paths_of, tree_from_mask

from eagle3core.config import EngineConfig, GenerationConfig
from eagle3core.engine import Engine, Response
from eagle3core.kernels.layer.rms_norm import rms_norm_reference
from eagle3core.kernels.slots.slot_state import DRAFT_LENGTH, N_PENDING
from eagle3core.speculative import SpeculativeConfig
from eagle3core.step.admission import SlotRequest
from eagle3core.step.outcome import RowOutcome
from eagle3core.step.tree import FlatTree
from eagle3core.trace import RecordingTrace
from lab.parity.derived import with_derived

pytestmark = pytest.mark.reference

# Of the recorded run alone, which computed in fp32: ours computes in fp64, so that no machine's rounding adds to it.
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

    def tap(self, name: str, value: Tensor, valid: Tensor | None = None) -> None:
        super().tap(name, value, valid)
        if self._scopes[-1:] == ["verify"] and name == "target.embed" and self.engine is not None:
            state = self.engine.runner.state
            assert state.draft is not None
            token = torch.arange(int(state.state[DRAFT_LENGTH, 0] + state.state[N_PENDING, 0]))
            block = state.draft.k.shape[2]
            held = state.tables[0].long()[token // block]
            k, v = (pages[held, :, token % block].transpose(0, 1)[None] for pages in (state.draft.k, state.draft.v))
            self.committed.append((k.clone(), v.clone()))


@pytest.fixture(scope="module")
def chain() -> Golden:
    return load("official_chain.npz")


@pytest.fixture(scope="module")
def ours(chain: Golden) -> tuple[CacheTrace, Response, Engine]:
    spec = SpeculativeConfig(model=str(GOLDEN / "draft"), num_speculative_tokens=DEPTH)
    config = EngineConfig(
        session_len=64, max_batch_size=1, block_size=8, prefill_chunk=64, dtype="float64", device="cpu",
        speculative_config=spec,
    )  # fmt: skip
    trace = CacheTrace()
    engine = Engine.from_pretrained(GOLDEN / "target", config, trace=trace)
    trace.engine = engine
    engine.runner.replay_by(DerivedToo())
    n_tokens = len(chain["tokens_ea"])
    settings = GenerationConfig(max_new_tokens=n_tokens, ignore_eos=True)
    response = engine.generate([chain["prompt_ids"].tolist()], settings)[0]
    geometry, draft = engine.target.geometry, engine.draft
    assert draft is not None
    widths = {"target.head": geometry.vocab_size, "draft.head": draft.geometry.draft_vocab_size}
    trace.tensors = with_derived(trace.tensors, engine.target.taps, widths)
    return trace, response, engine


def draft_rows(trace: RecordingTrace, round_: int, level: int, stage: str) -> Tensor:
    """Our rows of the official draft forward `level` of a round; its first one includes our draft prefill, whose
    columns alone are then given: those of k and v, where it made no q."""
    rows = newest_rows(trace, round_, level, stage)
    before = trace.tensors.get(f"prefill/draft.{stage}") if round_ == level == 0 else None
    if before is None:
        return rows
    return torch.cat([before, rows[:, -before.shape[1] :] if before.ndim > 1 else rows])


def newest_rows(trace: RecordingTrace, round_: int, level: int, stage: str) -> Tensor:
    """The same without the draft prefill."""
    return trace.tensors[f"step{round_}/{f'chain{level}' if level else 'extend'}/draft.{stage}"]


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
    assert_within(tensors["prefill/target.7.mlp"], chain["prefill/final_norm_in"][0, -1:], "input of the final norm")
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
    projections = torch.cat([chain[f"{layer}.self_attn.{name}_proj/out"] for name in "qkv"], dim=-1)
    known = rows("qkv")
    # Of a prompt, what lies past keys and values is not computed: our rows are then the official ones' last.
    residual = rows("attn")
    n = len(residual)
    post_norm = rms_norm_reference(residual, draft.layer.mlp_gain, draft.geometry.block.rms_norm_eps)
    pairs = {
        "fc" if level == 0 else "state fed back": (
            rows("fc"), chain[f"{key}/fc/out"] if level == 0 else chain[f"{key}/in_hidden"]
        ),
        "embedding norm": (rows("concat")[:, :width], chain[f"{layer}.input_layernorm/out"]),
        "hidden norm": (rows("concat")[:, width:], chain[f"{layer}.hidden_norm/out"]),
        "k and v": (known, projections[..., -known.shape[-1] :]),
        "q, k, v": (newest_rows(trace, round_, level, "qkv"), projections),
        "attention": (residual - rows("fc")[-n:], chain[f"{layer}.self_attn.o_proj/out"]),
        "post-attention norm": (post_norm, chain[f"{layer}.post_attention_layernorm/out"]),
        "mlp": (rows("feedback") - residual, chain[f"{layer}.mlp.down_proj/out"]),
        "layer": (rows("feedback"), chain[f"{layer}/out"]),
        "final norm": (rows("norm"), chain[f"{key}/norm/out"]),
        "head": (rows("head"), chain[f"{key}/lm_head/out"]),
    }  # fmt: skip
    for what, (mine, official) in pairs.items():
        assert_within(mine, official.reshape(-1, mine.shape[-1])[-len(mine) :], f"{what} of {key}")


@pytest.mark.parametrize("round_", ROUNDS)
def test_the_committed_draft_cache_equals_the_official_one(
    chain: Golden, ours: tuple[CacheTrace, Response, Engine], round_: int
) -> None:
    k, v = ours[0].committed[round_]
    assert k.shape == chain[f"r{round_}/draft_k"].shape
    assert_within(k, chain[f"r{round_}/draft_k"], "keys")
    assert_within(v, chain[f"r{round_}/draft_v"], "values")


class Verified(NamedTuple):
    """One recorded tree, verified by our target in one pass: what it gave for the prompt and for the nodes."""

    tree: FlatTree
    prompt: dict[str, Tensor]
    nodes: dict[str, Tensor]
    row: RowOutcome


@pytest.fixture(scope="module")
def golden_tree() -> Golden:
    return load("official_tree.npz")


@pytest.fixture(scope="module")
def verified(golden_tree: Golden) -> list[Verified]:
    """Both rounds; round 0 accepts nothing, so round 1 begins one token later, at the bonus token."""
    assert int(golden_tree["r0/verify/accept_len"]) == 0
    prompt, found = golden_tree["prompt_ids"].tolist(), []
    for round_ in ROUNDS:
        tree = tree_from_mask(golden_tree[f"r{round_}/tree/mask"][0, 0])
        tokens = golden_tree[f"r{round_}/tree/tokens"].flatten()
        runner = tree_runner(GOLDEN / "target", tree, dtype=torch.float64)
        before, during = RecordingTrace(), RecordingTrace()
        runner.admit(0, SlotRequest(0, prompt, 99, ()), before)
        assert runner.collect(everything=True)[0].rows[0].tokens == [int(tokens[0])], "the root"
        runner.state.step.drafted.copy_(tokens)
        runner.enqueue(1, 0, during)
        [outcome] = runner.collect(everything=True)
        widths, taps = {"target.head": runner.target.geometry.vocab_size}, runner.target.geometry.default_taps
        named = [with_derived(trace.tensors, taps, widths) for trace in (before, during)]
        found.append(Verified(tree, named[0], named[1], outcome.rows[0]))
        prompt = [*prompt, int(tokens[0])]
    return found


def test_the_trees_prompt_taps_agree_with_the_official_capture(golden_tree: Golden, verified: list[Verified]) -> None:
    prompt = verified[0].prompt
    assert_within(prompt["prefill/target.taps"], golden_tree["prefill/aux"], "taps")
    assert int(prompt["prefill/target.head"][-1].argmax()) == int(golden_tree["prefill/token"])


@pytest.mark.parametrize("round_", ROUNDS)
def test_positions_and_paths_recovered_from_the_recorded_mask_are_the_official_ones(
    golden_tree: Golden, round_: int
) -> None:
    tree = tree_from_mask(golden_tree[f"r{round_}/tree/mask"][0, 0])
    assert tree.depths.tolist() == golden_tree[f"r{round_}/tree/pos"].tolist()
    assert paths_of(tree).tolist() == golden_tree[f"r{round_}/tree/retrieve"].tolist()


@pytest.mark.parametrize("round_", ROUNDS)
def test_node_logits_and_taps_of_the_recorded_tree_agree_in_one_pass(
    golden_tree: Golden, verified: list[Verified], round_: int
) -> None:
    nodes, official = verified[round_].nodes, golden_tree[f"r{round_}/verify/node_logits"]
    logits = nodes["verify/target.head"]
    assert_within(logits, official, "node logits")
    assert torch.equal(logits.argmax(-1), official.reshape(logits.shape).argmax(-1))
    assert_within(nodes["verify/target.taps"], golden_tree[f"r{round_}/verify/aux"], "taps of the nodes")


@pytest.mark.parametrize("round_", ROUNDS)
def test_acceptance_of_the_recorded_tree_is_the_official_one(
    golden_tree: Golden, verified: list[Verified], round_: int
) -> None:
    key, (tree, _, _, row) = f"r{round_}", verified[round_]
    tokens = golden_tree[f"{key}/tree/tokens"].flatten()
    paths = paths_of(tree)
    candidates = torch.where(paths >= 0, tokens[paths.clamp_min(0)], -1)
    recorded = golden_tree[f"{key}/verify/candidates"]
    assert torch.equal(candidates[paths >= 0], recorded[paths >= 0])
    assert row.n_accepted == int(golden_tree[f"{key}/verify/accept_len"])
    best = golden_tree[f"{key}/tree/retrieve"][int(golden_tree[f"{key}/verify/best"])]
    assert row.tokens[:-1] == tokens[best[1 : row.n_accepted + 1]].tolist()
    if round_ + 1 in ROUNDS:
        assert row.tokens[-1] == int(golden_tree[f"r{round_ + 1}/tree/tokens"][0, 0])
