"""Planted pairs with experts: published sizes, bytes of 4 bits as they are kept, and routing as the dial says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rings import slow_but

from eagle3core import Engine, EngineConfig, GenerationConfig, SpeculativeConfig
from eagle3core.checkpoint import draft_shapes, target_shapes
from eagle3core.geometry import ExpertsGeometry
from eagle3core.kernels.experts import PlainMatrices
from eagle3core.trace import RecordingTrace
from eagle3core.weights import PackedExperts, stored_bytes
from lab.errors import ExperimentError
from lab.pairs.planted import GEOMETRIES, PlantedGeometry, PlantedPair, find_geometry
from lab.pairs.planted.check import measure_margin
from lab.pairs.planted.disk import write_pair
from lab.pairs.planted.plain_logits import causal_logits
from lab.pairs.planted.tokens import plan_tokens
from lab.parity.hf_target import load_model
from lab.probes.bench.floors import draft_weight_bytes, weight_bytes
from lab.probes.bench.rounds import Work
from lab.probes.bench.routed import count_experts, routing_values
from lab.probes.bench.source import PairSource
from lab.probes.proofs.plans import shapes_of

pytestmark = pytest.mark.reference

K = 3
SETTINGS = {"session_len": 160, "max_batch_size": 2, "block_size": 16, "prefill_chunk": 32}


def in_small(name: str) -> PlantedGeometry:
    """The small geometry with experts, as gpt-oss has them, or as Qwen3 does."""
    made = find_geometry("nano-experts")
    if name == "gpt-oss":
        return made
    target = made.target
    experts = replace(target.block, experts=ExpertsGeometry(32, 4, 32), has_sinks=False, has_qk_norm=True)
    return replace(made, target=replace(target, block=experts, windows=(), attention_bias=False))


def source_of(pair: PlantedPair) -> PairSource:
    """The pair as the bench takes it."""
    target, draft = pair.models()
    mapping = pair.tokens.draft_to_target
    return PairSource(target, draft, pair.target_weights, pair.draft_weights, mapping, pair, pair.card())


def test_published_geometries_have_the_published_sizes() -> None:
    for name, billions, gigabytes in (
        ("gpt-oss-20b", 20.9, 13.8), ("gpt-oss-120b", 116.8, 65.2), ("qwen3-30b-a3b", 30.5, 61.1),
    ):  # fmt: skip
        made = GEOMETRIES[name]
        assert made.n_weights / 1e9 == pytest.approx(billions, abs=0.05), name
        assert weight_bytes(made.target, 2) / 1e9 == pytest.approx(gigabytes, abs=0.1), name


def test_the_head_of_gpt_oss_has_the_widths_asked_for() -> None:
    draft = GEOMETRIES["gpt-oss-120b"].draft
    shapes = dict(draft_shapes(draft))
    assert shapes["fc.weight"] == (2880, 8640)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (4096, 5760)
    assert shapes["midlayer.self_attn.k_proj.weight"] == (512, 5760)
    assert shapes["midlayer.mlp.gate_proj.weight"] == (17280, 2880)
    assert draft.taps == (2, 18, 33), "inputs of layers, which are the outputs of 1, 17 and 32"
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e6 == pytest.approx(307.6, abs=0.1)
    thin = GEOMETRIES["gpt-oss-120b-thin"].draft
    assert draft_weight_bytes(thin, 2) < 0.5 * draft_weight_bytes(draft, 2)


def test_a_cut_geometry_has_the_first_layers_and_says_so() -> None:
    cut = find_geometry("gpt-oss-120b, 2 layers")
    assert (cut.target.n_layers, cut.target.windows, cut.draft.taps) == (2, (128, 0), (0, 1, 2))
    assert cut.target.block == GEOMETRIES["gpt-oss-120b"].target.block
    assert find_geometry("gpt-oss-20b, 12 layers").draft.taps == (2, 6, 9)
    for wrong in ("gpt-oss-120b, 1 layers", "gpt-oss-120b, 37 layers"):
        with pytest.raises(ExperimentError, match="2 to 36"):
            find_geometry(wrong)
    with pytest.raises(ExperimentError, match="did you mean 'gpt-oss-120b'"):
        find_geometry("gpt-oss-120, 2 layers")


def test_experts_in_4_bits_are_made_and_kept_as_bytes() -> None:
    pair = PlantedPair("nano-experts", share=0.8, dtype=torch.bfloat16)
    weights, inner = pair.target_weights, "model.layers.1.mlp.experts."
    blocks, scales = weights[f"{inner}gate_up_proj_blocks"], weights[f"{inner}gate_up_proj_scales"]
    assert (blocks.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    assert sorted({*(blocks & 15).flatten().tolist()}) == list(range(16)), "every value of 4 bits occurs"
    target, _ = pair.models()
    held = sum(tensor.numel() * tensor.element_size() for tensor in target.own_tensors())
    assert held == weight_bytes(pair.geometry.target, 2)
    experts = target.layers[1].mlp
    assert isinstance(experts, PackedExperts)
    decoded = torch.cat([experts.gate_up.of(i, torch.float32).flatten() for i in range(4)])
    assert float(decoded.square().mean().sqrt()) * 256**0.5 == pytest.approx(1.0, abs=0.05), "as other maps are"
    down = experts.down.of(3, torch.float32)
    assert bool((down[:32] == 0).all()), "nothing is added to codes"
    assert float((down[32:] == 0).float().mean()) < 0.2


@pytest.mark.parametrize("name", slow_but(["gpt-oss"], ["gpt-oss", "qwen3"]))
def test_greedy_output_follows_the_map_and_speculation_changes_no_token(name: str) -> None:
    pair = PlantedPair(in_small(name), share=0.8, repeated=0.4, dtype=torch.float32)
    source = source_of(pair)
    prompts = [*pair.prompts(1, 9), [7, 7, 7]]
    wanted = [pair.tokens.follow(prompt[-1], 16) for prompt in prompts]
    for k in (0, K):
        responses = source.engine(k, batch=2, session_len=64).generate(prompts, GenerationConfig(max_new_tokens=16))
        assert [response.token_ids for response in responses] == wanted


def test_shapes_without_weights_have_bytes_where_weights_have() -> None:
    packed = shapes_of(find_geometry("gpt-oss-120b"), "sm_90a").target
    for i, layer in enumerate(packed.layers):
        assert isinstance(layer.mlp, PackedExperts)
        assert layer.mlp.gate_up.tensors[0].dtype == torch.uint8, i
        assert layer.sinks is not None
        assert layer.sinks.dtype == torch.float32
    held = sum(tensor.numel() * tensor.element_size() for layer in packed.layers for tensor in layer.tensors)
    geometry = packed.geometry
    beside = 2 * (2 * geometry.vocab_size + 1) * geometry.block.hidden_size  # table, head and the last norm
    assert held == weight_bytes(geometry, 2) - beside


def test_qwen3s_experts_are_kept_in_fp8_where_asked_for() -> None:
    pair = PlantedPair(in_small("qwen3"), share=0.8, dtype=torch.bfloat16)
    plain, quantised = (pair.models(target_weights=weights)[0] for weights in ("as_stored", "fp8"))
    held = sum(tensor.numel() * tensor.element_size() for tensor in quantised.own_tensors())
    assert held == sum(stored_bytes(*named, 2, "fp8") for named in target_shapes(pair.geometry.target))
    for before, after in zip(plain.layers, quantised.layers, strict=True):
        assert isinstance(before.mlp, PackedExperts)
        assert isinstance(after.mlp, PackedExperts)
        assert isinstance(after.mlp.down, PlainMatrices)
        assert after.mlp.down.weight.dtype == torch.float8_e4m3fn
        for kept, maps in ((before.mlp.gate_up, after.mlp.gate_up), (before.mlp.down, after.mlp.down)):
            wanted, found = kept.of(5, torch.float64), maps.of(5, torch.float64)
            largest = wanted.abs().amax(1, keepdim=True)
            assert bool(((found - wanted).abs() <= wanted.abs() / 16 + largest / 448 / 1024).all()), "4 bits of each"
        assert torch.equal(before.mlp.router, after.mlp.router), "the choice is that of the plain target"
    engine = Engine(replace(quantised, taps=()), None, pair.config(0, **SETTINGS))
    (prompt,) = pair.prompts(1, 5)
    (response,) = engine.generate([prompt], GenerationConfig(max_new_tokens=6))
    assert response.token_ids == pair.tokens.follow(prompt[-1], 6)


def test_a_token_takes_the_same_experts_in_any_context() -> None:
    pair = PlantedPair("nano-experts", share=0.8, dtype=torch.float32)
    target, _ = pair.models()
    engine = Engine(replace(target, taps=()), None, pair.config(0, **SETTINGS))
    taken = []
    for before in ([5, 9], [1, 2, 3, 4, 5, 6, 7, 8, 4000]):
        engine.trace = trace = RecordingTrace()
        engine.generate([[*before, 77]], GenerationConfig(max_new_tokens=1))
        choices = [rows for name, rows in trace.tensors.items() if name.endswith(".experts")]
        assert len(choices) == target.geometry.n_layers
        taken.append(torch.stack([rows[-1] for rows in choices]))
    assert torch.equal(*taken)
    assert len({tuple(row) for row in taken[0].tolist()}) == target.geometry.n_layers, "every layer has others"


@pytest.mark.parametrize("repeated", slow_but([0.5], [0.0, 0.5, 0.9]))
def test_as_many_distinct_experts_are_read_as_the_dial_says(repeated: float) -> None:
    source = source_of(PlantedPair("nano-experts", share=0.9, repeated=repeated, dtype=torch.float32))
    experts = source.target_geometry.block.experts
    assert experts is not None
    for k in (0, K):
        engine = source.engine(k, batch=2, session_len=160)
        work = Work(engine, source.prompts(2, 8, 0), GenerationConfig(64, ignore_eos=True))
        read = count_experts(work, k)
        values = routing_values(experts, source.routing, k, 2)
        assert read == pytest.approx(values["experts_expected"], rel=0.05 if k == 0 else 0.12)
        assert values["experts_read"] is None
    alone = experts.n_read(2 * (K + 1))
    assert repeated == 0 or (read is not None and read < 0.9 * alone), "what repeats is read once"


def test_codes_are_kept_as_often_as_asked_for() -> None:
    for repeated in (0.0, 0.3, 0.9):
        tokens = plan_tokens(6000, 4000, 0.8, seed=1, repeated=repeated)
        ids = tokens.draft_to_target
        kept = tokens.code_holder[tokens.successor[ids]] == tokens.code_holder[ids]
        assert float(kept.float().mean()) == pytest.approx(repeated, abs=0.025)
        assert torch.equal(tokens.successor, plan_tokens(6000, 4000, 0.8, seed=1).successor)
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(ExperimentError, match="repeated experts"):
            plan_tokens(60, 40, 0.8, seed=1, repeated=wrong)
    with pytest.raises(ExperimentError, match="which has none"):
        PlantedPair("nano", share=0.5, repeated=0.5)


def test_the_next_token_is_decided_by_eight_times_the_error_of_bf16() -> None:
    margin = measure_margin(PlantedPair("nano-experts", share=0.8, dtype=torch.bfloat16))
    assert margin.holds, margin


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3"])
def test_a_written_pair_decodes_alike_and_hugging_face_agrees(name: str, tmp_path: Path) -> None:
    pair = PlantedPair(in_small(name), share=0.8, dtype=torch.float32)
    written = write_pair(tmp_path / "pair", pair)
    spec = SpeculativeConfig(model=str(written.draft), num_speculative_tokens=K)
    engine = Engine.from_pretrained(written.target, EngineConfig(**SETTINGS, device="cpu", speculative_config=spec))
    assert dict(target_shapes(engine.target.geometry)) == dict(target_shapes(pair.geometry.target))
    prompts = pair.prompts(2, 24)
    responses = engine.generate(prompts, GenerationConfig(max_new_tokens=8))
    assert [r.token_ids for r in responses] == [pair.tokens.follow(prompt[-1], 8) for prompt in prompts]
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        theirs = load_model(written.target, torch.float32, "eager").eval().float()(ids).logits
    ours = torch.stack([causal_logits(dict(pair.target_weights), pair.geometry.target, row) for row in ids])
    assert torch.equal(theirs.argmax(-1), pair.tokens.successor[ids])
    assert float((ours - theirs).abs().max()) < 1e-3 * float(theirs.abs().max())
