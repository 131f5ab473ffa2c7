"""On a GPU the kernels run the bench, its peers are captured and compiled, and all decode the planted tokens."""

from __future__ import annotations

import pytest
import torch

from lab.pairs.planted import PlantedPair, share_for_length
from lab.pairs.planted.check import check_dial, measure_margin
from lab.probes.bench.run import Bench
from lab.probes.bench.scenario import Point, Scenario
from lab.probes.bench.source import PairSource
from lab.rows.store import Row

# What torch's compiler warns of while it compiles a peer is not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]

SCENARIO = Scenario(
    geometry="nano", pair="planted", points=(Point(100, 2),), ks=(0, 3), share=0.8, tokens=48, rounds=2, warmup=1,
    dtype="bfloat16", device="cuda",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """One bench, by name of the row."""
    return {row.name: row for row in Bench(SCENARIO, tell=lambda _: None).run().rows}


def test_engine_and_peers_decode_the_planted_tokens(rows: dict[str, Row]) -> None:
    assert len(rows) == 5
    for row in rows.values():
        assert row.status == "measured", row.reason
        assert row.values["n_wrong_requests"] == 0
    assert rows["Speculative_Batch2_Context100_3tokens"].values["n_divergent"] == 0
    assert rows["Baseline_Batch2_Context100"].values["is_complete"] is True


def test_peers_are_captured_and_compiled(rows: dict[str, Row]) -> None:
    assert rows["Speculative_Batch2_Context100_3tokens/plain-torch"].values["captured"] is True
    assert rows["Baseline_Batch2_Context100/hf-static"].values["compiled"] is True


def test_stages_of_the_captured_step_are_timed(rows: dict[str, Row]) -> None:
    values = rows["Speculative_Batch2_Context100_3tokens"].values
    stages = {name.removeprefix("stage_ms."): ms for name, ms in values.items() if name.startswith("stage_ms.")}
    assert sum(ms for ms in stages.values() if isinstance(ms, float)) > 0
    assert any(name.startswith("draft.") for name in stages)
    assert any(name.startswith("target.") for name in stages)


def test_a_gpu_makes_the_same_weights_again_and_follows_the_same_map_as_a_cpu() -> None:
    pair, again = (PlantedPair("nano", share=0.8, seed=5, device="cuda") for _ in range(2))
    for name in pair.target_weights:
        assert torch.equal(pair.target_weights[name], again.target_weights[name])
    assert torch.equal(pair.tokens.successor, PlantedPair("nano", share=0.8, seed=5).tokens.successor)


@pytest.mark.slow
def test_the_8b_geometry_is_decisive_and_accepts_as_the_dial_says() -> None:
    share = share_for_length(3.0, 3)
    margin = measure_margin(PlantedPair("llama-3.1-8b", share=share, device="cuda"))
    assert margin.holds, margin
    torch.cuda.empty_cache()
    pair = PlantedPair("llama-3.1-8b", share=share, device="cuda")
    target, draft = pair.models()
    source = PairSource(target, draft, pair.target_weights, pair.draft_weights, None, pair, pair.card())
    engine = source.engine(3, batch=4, session_len=512 + 4400)
    found = check_dial(pair, engine, n_steps=5000, context=512)
    assert found.holds, found.values()


def test_a_row_names_the_gpu_it_ran_on(rows: dict[str, Row]) -> None:
    assert rows["Baseline_Batch2_Context100"].values["system.gpu_name"]
