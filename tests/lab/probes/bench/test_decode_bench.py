"""The decode bench measures the same work in every mode, and its bars add up to the step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from random_pairs import write_random_pair
from tiny_engines import new_tokens, tiny_engine

from eagle3core.step.program import Program
from eagle3core.step.replay import EagerReplayer, Staged
from lab.acceptance import figures as acceptance_figures
from lab.acceptance.measure import measure_acceptance
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt, prompts_for, prompts_from_ids
from lab.probes.bench import clocks
from lab.probes.bench import figures as decode_figures
from lab.probes.bench.clocks import BETWEEN, SPANS, PhaseClock, SpanClock, bar_of
from lab.probes.bench.decode import DecodeReport, ModeResult, measure_decode
from lab.probes.bench.rounds import Round

pytestmark = pytest.mark.reference

N_PROMPTS, N_TOKENS = 3, 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random pair over a vocabulary so small that drafts are accepted now and then."""
    torch.set_num_threads(1)
    return write_random_pair(tmp_path_factory.mktemp("pair"), vocab=6, draft_vocab=4)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Three prompts of different lengths."""
    random = torch.Generator().manual_seed(1)
    return prompts_from_ids([torch.randint(0, 6, (9 + i,), generator=random).tolist() for i in range(N_PROMPTS)])


@pytest.fixture(scope="module")
def report(pair: tuple[Path, Path], prompts: list[Prompt]) -> DecodeReport:
    """Three modes, three rounds, two requests together."""
    return measure_decode(*pair, prompts, (1, 3), max_new_tokens=N_TOKENS, rounds=3, warmup=0, batch=2)


def test_every_mode_does_the_same_work_in_every_round(report: DecodeReport) -> None:
    assert [mode.name for mode in report.modes] == ["baseline", "spec-1", "spec-3"]
    for mode in report.modes:
        assert {(r.n_tokens, r.n_requests) for r in mode.rounds} == {(N_PROMPTS * N_TOKENS, N_PROMPTS)}
        assert len(mode.rounds) == 3
        assert len({r.n_steps for r in mode.rounds}) == 1
        assert all(0 < r.prefill_s < r.total_s for r in mode.rounds)
    assert report.n_divergent == {1: 0, 3: 0}


def test_plain_decoding_takes_a_step_a_token_and_speculation_fewer(report: DecodeReport) -> None:
    # Two slots and three requests of 12 tokens: two run together for 11 steps, the third alone for 11 more.
    baseline, _, deep = report.modes
    assert baseline.rounds[0].n_steps == 2 * (N_TOKENS - 1)
    assert baseline.mean_acceptance_length is None
    assert deep.mean_acceptance_length is not None
    assert deep.rounds[0].n_steps <= baseline.rounds[0].n_steps


def test_the_bars_of_the_waterfall_add_up_to_the_step(report: DecodeReport) -> None:
    for mode in report.modes:
        assert sum(mode.span_ms.values()) == pytest.approx(mode.timed_step_ms)
        assert all(value >= 0 for value in mode.span_ms.values())
        assert set(mode.span_ms) == set(SPANS)
    baseline, _, deep = report.modes
    assert sum(value for span, value in baseline.span_ms.items() if span.startswith("draft.")) == 0
    for span in SPANS:
        assert deep.span_ms[span] > 0, f"{span} was not timed"


def test_rates_follow_from_times_and_counts() -> None:
    one = Round(total_s=2.0, prefill_s=0.5, n_tokens=64, n_requests=4, n_steps=30)
    assert one.tokens_per_s == 32.0
    assert one.decode_tokens_per_s == 40.0
    assert one.step_ms == pytest.approx(50.0)


def made_report(baseline: list[float], spec: list[float]) -> DecodeReport:
    """Two modes whose rounds took the given seconds for 101 tokens, one request, no prefill."""
    spans = dict.fromkeys(SPANS, 0.0)

    def rounds(seconds: list[float], n_steps: int) -> tuple[Round, ...]:
        return tuple(Round(s, 0.0, 101, 1, n_steps) for s in seconds)

    plain = ModeResult(0, rounds(baseline, 100), spans, 0.0, None)
    return DecodeReport("float32", "cpu", 1, (plain, ModeResult(2, rounds(spec, 50), spans, 0.0, 2.0)), {2: 0})


def test_a_speed_up_compares_the_modes_within_a_round() -> None:
    # The machine slows down by a factor of four over the rounds; the ratio within each stays 2.
    report = made_report([1.0, 2.0, 4.0], [0.5, 1.0, 2.0])
    assert report.speed_up(2).samples == (2.0, 2.0, 2.0)
    assert report.verdict(2) == (
        "Decoding only, spec-2 is 2.00 times as fast as plain decoding (2.00 to 2.00 over 3 rounds, batch 1), with "
        "prefill 2.00 times (2.00 to 2.00): a step takes 1.00 times as long and commits 2.00 tokens."
    )


def test_a_speed_up_is_told_with_and_without_prefill_and_a_slow_one_is_called_slow() -> None:
    spans = dict.fromkeys(SPANS, 0.0)
    plain = tuple(Round(2.0, 1.0, 101, 1, 100) for _ in range(3))
    slow = tuple(Round(3.0, 1.0, 101, 1, 100) for _ in range(3))
    modes = (ModeResult(0, plain, spans, 0.0, None), ModeResult(1, slow, spans, 0.0, 1.0))
    report = DecodeReport("float32", "cpu", 1, modes, {1: 0})
    values = report.row_values(report.at(1))
    assert values["speedup"] == pytest.approx(1 / 2)
    assert values["with_prefill_speedup"] == pytest.approx(2 / 3)
    assert values["step_over_base"] == pytest.approx(2.0)
    assert "Decoding only, spec-1 is 0.50 times" in report.verdict(1)
    assert "with prefill 0.67 times" in report.verdict(1)
    assert report.verdict(1).endswith("Speculation slows this pair at spec-1.")


@pytest.mark.usefixtures("page_style")
def test_the_words_of_the_waterfall_are_those_of_its_bars() -> None:
    # Timing every span slows plain steps (10 ms in the rounds, 40 ms drawn) more than speculative ones (30, 60).
    spans = dict.fromkeys(SPANS, 0.0)
    drawn = [spans | {"target.attn": 25.0, "target.mlp": 15.0}, spans | {"draft.attn": 22.0, "target.attn": 38.0}]
    modes = (
        ModeResult(0, (Round(1.0, 0.0, 101, 1, 100),), drawn[0], 40.0, None),
        ModeResult(2, (Round(1.5, 0.0, 101, 1, 50),), drawn[1], 60.0, 2.0),
    )
    report = DecodeReport("float32", "cpu", 1, modes, {2: 0})
    assert "a step takes 3.00 times as long" in report.verdict(2)
    figure, table, *_ = decode_figures.waterfall(report, 2)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["baseline: 40 ms a step", "spec-2: 60 ms a step"]
    assert table.groupby("mode")["ms_a_step"].sum().to_dict() == {"baseline": 40.0, "spec-2": 60.0}
    assert decode_figures.waterfall_words(report, 2) == (
        "Drawn: a plain step of 40 ms and a spec-2 step of 60 ms, 1.50 times as long; the longest part of the latter "
        "is target.attn with 38 ms, and the steps differ most in draft.attn (+22 ms) and target.mlp (-15 ms). Every "
        "part was timed on its own here, which made a plain step 4.00 and a spec-2 step 2.00 times as long as in the "
        "rounds above: the speed-up is that of the rounds."
    )


def test_row_values_name_their_units_and_keep_the_rounds(report: DecodeReport) -> None:
    values = report.row_values(report.modes[2])
    assert values["decode_tokens_per_s_p10"] <= values["decode_tokens_per_s"] <= values["decode_tokens_per_s_p90"]
    assert len(values["speedup_samples"]) == 3
    assert values["n_divergent"] == 0
    assert "speedup" not in report.row_values(report.modes[0])


@pytest.mark.parametrize(
    ("span", "bar"),
    [
        ("draft.attn", "draft.attn"),
        ("target.17.mlp", "target.mlp"),
        ("target.head", "target.head"),
        ("tree.grow", "tree"),
        ("rewind", "rewind"),
        ("BASE_DECODE_STEP", BETWEEN),
        ("EAGLE::KVCacheRewind", BETWEEN),
        ("EagleModule::forward", BETWEEN),
    ],
)
def test_every_span_has_one_bar(span: str, bar: str) -> None:
    assert bar_of(span) == bar


def test_a_span_is_not_charged_for_the_spans_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = SpanClock(torch.device("cpu")), [0.0]
    monkeypatch.setattr(clock, "_now", lambda: now[0])
    with clock.scope("step0"):
        now[0] += 1
        with clock.span("accept"):
            now[0] += 10
            with clock.span("commit"):
                now[0] += 100
            now[0] += 20
        with clock.span("EAGLE_TREE_MASKS"):
            now[0] += 1000
    with clock.span("accept"):  # outside a step, such as in a prefill
        now[0] += 5000
    assert dict(clock.bars_us) == {"accept": 30.0, "commit": 100.0, BETWEEN: 1001.0}
    assert clock.step_us == 1131.0


class SlowToCapture(EagerReplayer):
    """Captures take an hour of `now`."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.now = now

    def staged(self, program: Program) -> Staged:
        self.now[0] += 3600e6
        return super().staged(program)


def test_a_capture_is_no_part_of_a_timed_step(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = SpanClock(torch.device("cpu")), [0.0]
    monkeypatch.setattr(clock, "_now", lambda: now[0])
    engine = tiny_engine(pair, 2, max_batch_size=2)
    engine.runner.replay_by(SlowToCapture(now))
    engine.trace = clock
    engine.generate([[1, 2, 3], [1, 2]], [new_tokens(5), new_tokens(9)])
    assert now[0] >= 3 * 3600e6, "a step, a chunk and its end at least"
    assert clock.n_steps > 2
    assert sum(clock.bars_us.values()) == 0.0


def test_the_phase_clock_counts_steps_and_prefill_time() -> None:
    clock = PhaseClock(torch.device("cpu"))
    with clock.scope("prefill"):
        time.sleep(0.01)
    for step in range(3):
        with clock.scope(f"step{step}"), clock.scope("extend"), clock.span("draft.fc"):
            pass
    assert clock.n_steps == 3
    assert clock.prefill_s >= 0.01


def test_passes_that_follow_one_another_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(clocks, "synchronise", lambda device: waits.append(entered[-1]))
    clock, entered = PhaseClock(torch.device("cpu"), rests=False), [""]
    for name in ["prefill", "prefill", "prefill", "step0", "step1", "prefill", "step2", "step3", "prefill"]:
        entered.append(name)
        with clock.scope(name):
            time.sleep(0.01 * (name == "prefill"))
    assert waits == ["step0", "step2"]
    entered.append("the end")
    assert 0.05 <= clock.prefill_s == clock.prefill_s, "the last one, behind which no step comes, is counted once"
    assert waits == ["step0", "step2", "the end"]


def test_steps_begin_from_a_rested_device_once_after_each_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[str] = []
    names = ["prefill", "prefill", "step0", "step1", "prefill", "step2"]
    monkeypatch.setattr(clocks, "rest", lambda device: rested.append(entered[-1]) or 0.5)  # type: ignore[func-returns-value]
    clock, entered = PhaseClock(torch.device("cpu")), [""]
    for name in names:
        entered.append(name)
        with clock.scope(name):
            pass
    assert (rested, clock.rest_s, clock.n_steps) == (["step0", "step2"], 1.0, 3)


def test_unusable_arguments_are_refused(pair: tuple[Path, Path], prompts: list[Prompt]) -> None:
    for bad in ({"prompts": []}, {"ks": ()}, {"rounds": 0}, {"warmup": -1}, {"max_new_tokens": 1}):
        with pytest.raises(ExperimentError, match="at least one prompt"):
            measure_decode(*pair, **{"prompts": prompts, **bad})  # type: ignore[arg-type]


def test_every_picture_is_drawn_from_the_table_beside_it(
    pair: tuple[Path, Path], prompts: list[Prompt], report: DecodeReport
) -> None:
    from matplotlib import pyplot as plt

    _, speeds, *_ = decode_figures.speeds(report, 3)
    assert list(speeds["mode"]) == ["baseline", "spec-1", "spec-3"]
    _, spans, *_ = decode_figures.waterfall(report, 3)
    assert spans.groupby("mode")["share"].sum().tolist() == pytest.approx([1.0, 1.0])
    accepted = measure_acceptance(*pair, prompts, (1, 3), max_new_tokens=N_TOKENS, ignore_eos=True)
    _, lengths, *_ = acceptance_figures.lengths(accepted, 3, "")
    assert list(lengths["acceptance_length"]) == [depth.length.mean for depth in accepted.depths]
    _, positions, *_ = acceptance_figures.positions(accepted, 3)
    assert list(positions["position"]) == [1, 1, 2, 3]
    _, counts, *_ = acceptance_figures.histogram(accepted, 3)
    assert counts.groupby("mode")["share"].sum().tolist() == pytest.approx([1.0, 1.0])
    _, ranks, *_ = acceptance_figures.ranks(accepted.at(3))
    assert ranks["rank 1, accepted"][0] == accepted.at(3).by_position[0]
    _, categories, *_ = acceptance_figures.categories(accepted.at(3))
    assert categories["prompts"].sum() == N_PROMPTS
    plt.close("all")


def test_a_target_without_a_tokenizer_gets_random_prompts_and_says_so(pair: tuple[Path, Path]) -> None:
    given, source = prompts_for(pair[0], limit=3, max_tokens=20)
    assert [len(prompt.ids) for prompt in given] == [20, 12, 20]
    assert "random ids" in source
    with pytest.raises(ExperimentError, match="n_prompts is 0"):
        prompts_for(pair[0], limit=0, max_tokens=20)
