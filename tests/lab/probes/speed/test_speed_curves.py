"""Speed-up over acceptance: lines, break-even, best depth and recommendation, by hand and by simulation."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.errors import ExperimentError
from lab.pairs.planted.tokens import expected_length
from lab.probes.speed.curves import (
    Range,
    best_at,
    best_of,
    break_even_length,
    break_even_share,
    envelope,
    is_clear,
    speedup_line,
)
from lab.probes.speed.recommend import (
    Acceptance,
    advice,
    break_even_batch,
    choices,
    measured_acceptance,
    prediction_line,
    predictions,
)
from lab.probes.speed.rows import Depth, PointSpeed, StageCost, Stages
from lab.probes.speed.waterfall import above_floor, checks, has_steps, parts_of, table_of, why
from lab.rows.store import Row

pytestmark = pytest.mark.reference


def exact(over_base: dict[int, float]) -> dict[int, Range]:
    return {k: Range(over, over, over) for k, over in over_base.items()}


def point(batch: int, over_base: dict[int, float], *, context: int = 1024, base_ms: float = 4.0) -> PointSpeed:
    """A point whose steps cost these multiples of a plain one, measured at 2 tokens a step."""
    made = PointSpeed(context, batch, 0.8)
    for k, over in over_base.items():
        length = 2.0 if k else None
        rate = 1e3 * batch * (length or 1.0) / (base_ms * over)
        gain = Range(2.0 / over, 2.0 / over, 2.0 / over) if k else None
        dial = expected_length(0.8, k) if k else None
        made.depths[k] = Depth(k, base_ms * over, rate, Range(over, over, over), 1.1, length, dial, gain)
    return made


# -- curves


def test_a_step_of_three_drafts_at_one_and_a_quarter_plain_steps_brings_what_the_hand_counts() -> None:
    assert speedup_line(3, 1.25) == ((1.0, 0.8), (4.0, 3.2))
    assert break_even_length(3, 1.25) == 1.25
    assert break_even_length(1, 2.5) is None, "two tokens never pay for two and a half steps"
    assert break_even_length(1, 2.0) == 2.0, "all accepted is just enough"


def test_break_even_as_a_share_is_the_share_that_gives_the_length() -> None:
    assert break_even_share(1, 1.25) == pytest.approx(0.25), "1 + a = 1.25"
    share = break_even_share(3, 1.5)
    assert share is not None
    assert expected_length(share, 3) == pytest.approx(1.5)
    assert break_even_share(3, 0.97) == 0.0, "cheaper than a plain step: rejected drafts cost nothing"
    assert break_even_share(1, 2.5) is None


def test_the_best_depth_is_found_with_its_advantage_over_the_next() -> None:
    found = best_of({0: 1.0, 1: 1.25, 2: 1.5}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert (found.k, found.speedup, found.next_k) == (2, 2.0, 1)
    assert found.advantage == pytest.approx(2.0 / 1.6 - 1)
    assert best_of({0: 1.0}, {0: 1.0}).next_k is None
    tie = best_of({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert tie.k == 0, "of equals the one with fewer drafts"
    assert best_of({0: 1.0, 1: 1.25, 2: 1.5}, {0: 1.0, 1: 2.0}).k == 1, "a depth without a length is not chosen"


def test_the_envelope_of_one_draft_begins_where_it_breaks_even() -> None:
    plain, one = envelope({0: 1.0, 1: 1.25})
    assert (plain.k, plain.low, one.k, one.high) == (0, 0.0, 1, 1.0)
    assert plain.high == one.low == pytest.approx(0.25)


def test_the_envelope_covers_all_shares_once_and_its_reigns_are_truly_the_best() -> None:
    over = {0: 1.0} | {k: 1.07 + 0.045 * k for k in range(1, 8)}
    spans = envelope(over)
    assert [span.k for span in spans] == sorted({span.k for span in spans}), "deeper as more is accepted"
    assert spans[0].low == 0.0
    assert spans[-1].high == 1.0
    assert spans[-1].k == 7
    for before, after in pairwise(spans):
        border = before.high
        assert after.low == border
        both = [expected_length(border, k) / over[k] for k in (before.k, after.k)]
        assert both[0] == pytest.approx(both[1], rel=1e-6), "equal at the border"
    for share in (0.01, 0.2, 0.5, 0.77, 0.99):
        span = next(one for one in spans if one.low <= share <= one.high)
        speeds = {k: expected_length(share, k) / r for k, r in over.items()}
        assert max(speeds, key=lambda k: speeds[k]) == span.k == best_at(over, share).k


def test_a_best_depth_is_clear_only_if_its_worst_rounds_beat_the_others_best() -> None:
    lengths = {0: 1.0, 1: 1.8, 2: 2.4}
    assert is_clear(exact({0: 1.0, 1: 1.2, 2: 1.5}), lengths)
    close = {0: Range(1.0, 1.0, 1.0), 1: Range(1.2, 1.15, 1.25), 2: Range(1.5, 1.49, 1.6)}
    assert best_of({k: r.median for k, r in close.items()}, lengths).k == 2
    assert not is_clear(close, lengths), "2.4 / 1.6 is less than 1.8 / 1.15"


def test_simulated_decoding_is_as_fast_as_the_formula_says() -> None:
    """Acceptance by chance, a step's cost with noise. Standard error 0.8%: by chance one of 250 seeds fails."""
    dice, share, k, over = random.Random(5), 0.7, 3, 1.2
    off = 0
    for _ in range(40):
        tokens = time_spent = 0.0
        for _ in range(4_000):
            accepted = next((i for i in range(k) if dice.random() >= share), k)
            tokens += accepted + 1
            time_spent += over * (1 + dice.gauss(0, 0.01))
        off += abs(tokens / time_spent / (expected_length(share, k) / over) - 1) > 0.03
    assert off == 0


# -- recommendation


def test_tokens_a_second_are_batch_times_length_over_the_step() -> None:
    [choice] = choices([point(4, {0: 1.0, 1: 1.25, 3: 1.6})], Acceptance.of_share(0.5, 3))
    assert choice.tokens_per_s == pytest.approx({0: 1000.0, 1: 4 * 1.5 / 5e-3, 3: 4 * 1.875 / 6.4e-3})
    assert (choice.k, choice.next_k) == (1, 3)
    assert choice.speedup == pytest.approx(1.2)
    assert choice.advantage == pytest.approx(1.2 / (1.875 / 1.6) - 1)


def test_a_depth_beyond_the_measured_positions_is_not_recommended() -> None:
    acceptance = Acceptance("two positions", (0.9, 0.8))
    assert acceptance.length(2) == pytest.approx(2.7)
    assert acceptance.length(3) is None
    [choice] = choices([point(1, {0: 1.0, 2: 1.3, 3: 1.31})], acceptance)
    assert choice.k == 2
    assert set(choice.tokens_per_s) == {0, 2}


def test_the_break_even_batch_is_the_first_from_which_on_nothing_pays() -> None:
    acceptance = Acceptance.of_share(0.3, 1)
    costs = {1: 1.1, 2: 1.4, 4: 1.2, 8: 1.5, 16: 1.6}  # pays below 1.3
    found = choices([point(batch, {0: 1.0, 1: over}) for batch, over in costs.items()], acceptance)
    assert [choice.k for choice in found] == [1, 0, 1, 0, 0]
    assert break_even_batch(found) == 8, "at 4 it pays again, so 2 is not the border"
    assert break_even_batch(found[:3]) is None, "the largest still gains"
    text = advice(found, acceptance)
    assert "no gain from batch 8 on" in text
    assert "batch 1 spec-1, 1.18 times plain decoding" in text
    assert "nothing to choose" in advice([], acceptance)


def test_points_without_a_baseline_or_without_drafts_give_no_choice() -> None:
    acceptance = Acceptance.of_share(0.5, 3)
    assert choices([point(1, {0: 1.0})], acceptance) == []
    assert choices([point(1, {1: 1.2, 3: 1.4})], acceptance) == []


def test_expected_and_measured_are_compared_at_both_acceptances() -> None:
    [found] = predictions([point(1, {0: 1.0, 1: 1.25})])
    assert found.error == pytest.approx(0.0), "measured with the same two tokens a step"
    assert found.at_dial == pytest.approx(1.8 / 5e-3)
    assert "at the planted one by at most 10.0%" in prediction_line([found])
    assert prediction_line([]).startswith("No speed was measured")


def test_measured_acceptance_is_the_deepest_rows(tmp_path: Path) -> None:
    def row(k: int, shares: list[float]) -> str:
        return Row(
            run="r", job="j", notebook="31_acceptance", kind="acceptance", name=f"spec-{k}", environment="e",
            recorded_at="t", values={"acceptance_by_position": list(shares)},
        ).line()  # fmt: skip

    path = tmp_path / "night" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text(row(1, [0.7]) + row(3, [0.7, 0.5, 0.4]))
    assert measured_acceptance(path).by_position == (0.7, 0.5, 0.4)
    path.write_text("")
    with pytest.raises(ExperimentError, match="no acceptance by position"):
        measured_acceptance(path)
    with pytest.raises(ExperimentError, match=r"acceptance share 1\.5"):
        Acceptance.of_share(1.5, 3)


# -- waterfall


def stages(*costs: StageCost) -> Stages:
    return Stages(costs, sum(cost.own_us for cost in costs), 1.0, 1.004, "profile")


def test_parts_of_a_stage_sum_to_its_own_time_and_none_is_negative() -> None:
    for cost in (
        StageCost("target.mlp", 100.0, 80.0, 15.0, 5.0, 3),
        StageCost("from a cache", 60.0, 80.0, -25.0, 5.0, 3),
        StageCost("between steps", 8.0, 0.0, 0.0, 8.0, 0),
    ):
        parts = parts_of(cost)
        assert parts is not None
        assert sum(parts) == pytest.approx(cost.own_us)
        assert min(parts) >= 0
    assert parts_of(StageCost("target.mlp", 100.0, 80.0, None, None, None)) is None
    assert parts_of(StageCost("target.mlp", 100.0, 80.0, 15.0, 5.0, 3)) == (80.0, 15.0, 5.0)


def test_the_waterfall_names_the_three_stages_that_hold_most_above_the_floor() -> None:
    made = PointSpeed(512, 1)
    made.stages[0] = stages(
        StageCost("target.attn", 50.0, 20.0, 25.0, 5.0, 3), StageCost("target.mlp", 100.0, 90.0, 10.0, 0.0, 2),
        StageCost("accept", 4.0, 0.0, 3.0, 1.0, 1), StageCost("between steps", 6.0, 0.0, 0.0, 6.0, 0),
    )  # fmt: skip
    text = why(made, 3)
    assert "0.160 ms, 0.050 ms of it above" in text
    assert "92% of that in target.attn 30 us, target.mlp 10 us, between steps 6 us" in text
    assert above_floor(made.stages[0].costs[0]) == 30.0
    assert checks(made, 3) == (
        "plain decoding: own times sum to 100.00% of the step; with its stages timed a step takes 1.004 of its time"
    )
    table = table_of(made, 3)
    assert list(table["step"].unique()) == ["plain decoding"], "what was not measured is not drawn"
    assert table["own_us"].sum() == pytest.approx(160.0)
    assert table["share_of_step"].sum() == pytest.approx(1.0)


def test_the_sentence_of_a_waterfall_is_computed_from_its_bars() -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from lab.probes.speed import waterfall

    made = PointSpeed(512, 1)
    # In the first stage more time is a gap than is above its floor: kernels beat the read ceiling, from a cache.
    costs = StageCost("target.attn", 50.0, 45.0, -10.0, 15.0, 3), StageCost("target.mlp", 100.0, 90.0, 10.0, 0.0, 2)
    made.stages[0] = Stages(costs, 160.0, 150 / 160, 1.0, "profile")
    figure, table, *_ = waterfall.waterfall(made, 0, "stored")
    bars = figure.axes[0].patches
    ends = [bar.get_x() + bar.get_width() for bar in bars]
    above = sum(bar.get_width() for bar in bars if bar.get_facecolor() != bars[0].get_facecolor())
    assert max(ends) == pytest.approx(150.0)
    assert above == pytest.approx(25.0)
    assert why(made, 0).startswith(
        "Plain decoding takes 0.150 ms, 0.025 ms of it above the floor of its bytes, 100% of"
    )
    assert list(table["above_floor_us"]) == [15.0, 10.0]
    assert list(table["floor_us"] + table["kernels_above_us"] + table["gap_us"]) == [50.0, 100.0]


def test_of_a_step_that_was_not_split_no_floor_is_told() -> None:
    made = PointSpeed(24, 1)
    costs = StageCost("target.attn", 50.0, 0.1, None, None, None), StageCost("target.mlp", 150.0, 0.2, None, None, None)
    made.stages[0] = Stages(costs, 200.0, None, 1.0, "missing: no profile")
    assert why(made, 0) == "Plain decoding takes 0.200 ms, 100% of it in target.mlp 150 us, target.attn 50 us."
    assert has_steps(made, 3), "plain decoding is drawn alone"
    made.stages[5] = made.stages.pop(0)
    assert not has_steps(made, 3)


def test_pictures_are_drawn_from_their_tables() -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    from lab.probes.speed import figures, waterfall

    over: dict[int, float] = {0: 1.0, 1: 1.1, 3: 1.2, 7: 12.0}
    sweep = [point(batch, over, context=2048) for batch in (1, 2, 4, 8)]
    single = point(1, over, context=512)
    assert figures.curve_points([single, *sweep]) == [single]
    assert figures.curve_points(sweep) == sweep[:1]
    fig, table, *_ = figures.speed_curve(single, k=3, share=0.7, source="stored")
    assert list(table["break_even_tokens"]) == [1.1, 1.2, "never"]
    assert "breaks even at 1.20" in figures.curve_words(single, 3)
    assert "never breaks even" in figures.curve_words(single, 7)
    assert "was not measured" in figures.curve_words(single, 5)
    fig, table, *_ = figures.best_depth([single], "stored")
    assert list(table["from_share"])[1:] == list(table["to_share"])[:-1]
    found: dict[str, Any] = {"share 0.80": choices([single, *sweep], Acceptance.of_share(0.8, 7))}
    fig, table, *_ = figures.recommendation(found, "stored")
    assert len(table) == 5
    assert np.shape(fig.axes[0].lines[0].get_xdata()) == (4,), "the sweep is a line, the single point is not"
    single.stages[0] = stages(StageCost("target.mlp", 100.0, 90.0, None, None, None))
    fig, table, *_ = waterfall.waterfall(single, 3, "stored")
    assert json.loads(table.to_json(orient="records"))[0]["gap_us"] is None
    plt.close("all")
