"""Controls are what the engine's own look-ups accept, and a head that beats none of them is called not working."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import pytest
from agreeing_pairs import write_agreeing_pair
from hypothesis import given
from hypothesis import strategies as st
from random_pairs import write_random_pair
from rings import slow_but
from tiny_engines import (
    Pair,
    drafting_engine,
    engine_config,
    new_tokens,
    plain_tokens,
    random_prompts,
    tiny_engine,
    write_tiny_pair,
)

from eagle3core import Engine, SpeculativeConfig
from eagle3core.lookup import LOOKUPS
from eagle3core.metrics import RequestMetrics, StepRecord
from eagle3core.request import Response
from lab.acceptance import control_figures
from lab.acceptance.controls import (
    CONTROLS,
    BigramDrafts,
    BigramTable,
    Comparison,
    ControlAcceptance,
    compare_with_controls,
    replayed_steps,
)
from lab.acceptance.counts import count_acceptance
from lab.acceptance.intervals import Interval
from lab.pairs.prompts import Prompt

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_tiny_pair(tmp_path_factory.mktemp("controls"))


def head_report(pair: Pair, k: int, prompts: list[list[int]], n: int) -> Comparison:
    """The tiny pair's head beside the controls."""
    given = [Prompt(tuple(prompt), "") for prompt in prompts]
    responses = tiny_engine(pair, k, collect_draft_ranks=True).generate(prompts, new_tokens(n))
    return compare_with_controls(count_acceptance(k, given, responses, len), given)


@pytest.mark.parametrize(
    ("method", "k"),
    slow_but(
        [("ngram", 3), ("suffix", 1), ("suffix", 8)], [(method, k) for method in sorted(LOOKUPS) for k in (1, 3, 8)]
    ),
)
def test_the_replay_accepts_what_the_engine_accepts_step_by_step(pair: Pair, method: str, k: int) -> None:
    prompts = random_prompts([3, 9, 1, 17, 22])
    text = plain_tokens(pair, prompts, 30)
    engine = drafting_engine(pair, {"method": method, "num_speculative_tokens": k})
    n_accepted = n_cut = 0
    for prompt, plain, drafted in zip(prompts, text, engine.generate(prompts, new_tokens(30)), strict=True):
        steps = drafted.req_metrics.steps
        replayed = replayed_steps(LOOKUPS[method](), prompt, plain, k)
        assert [(s.start, s.n_draft, s.n_committed, s.cut) for s in replayed] == [
            (s.start, s.n_draft, s.n_committed, s.cut) for s in steps
        ]
        complete = [step for step in steps if not step.cut]
        assert [s.n_accepted for s in replayed if not s.cut] == [s.n_accepted for s in complete]
        n_accepted += sum(step.n_accepted for step in complete)
        n_cut += sum(step.cut for step in steps)
    assert n_accepted > 20
    assert n_cut > 0 or k == 1, "a step that is cut short is among them"


def test_a_report_holds_the_controls_of_the_same_text(pair: Pair) -> None:
    prompts = random_prompts([3, 9, 17])
    comparison = head_report(pair, 3, prompts, 24)
    assert tuple(control.name for control in comparison.controls) == CONTROLS
    for control in comparison.controls[:-1]:
        spec = SpeculativeConfig(method=control.name, num_speculative_tokens=3)
        engine = Engine.from_pretrained(pair[0], engine_config(pair, None, speculative_config=spec))
        steps = [s for r in engine.generate(prompts, new_tokens(24)) for s in r.req_metrics.steps]
        complete = [step for step in steps if not step.cut]
        assert (control.n_steps, control.n_cut) == (len(complete), len(steps) - len(complete))
        assert control.length.mean == pytest.approx(sum(s.n_committed for s in complete) / len(complete))
        assert control.n_drafted == sum(s.n_draft for s in complete)
        assert control.row_values()["control_length"] == control.length.mean


@given(st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=4), st.integers(0, 4), st.integers(0, 5))
def test_a_bigram_table_gives_the_likeliest_next_token_again_and_again(
    texts: list[list[int]], last: int, n: int
) -> None:
    expected, at = list[int](), last
    for _ in range(n):
        followers = [b for text in texts for a, b in pairwise(text) if a == at]
        if not followers:
            break
        counts = Counter(followers)
        at = max(counts, key=lambda token: (counts[token], -followers.index(token)))
        expected.append(at)
    drafts = BigramDrafts(BigramTable(texts))
    drafts.extend([9, last])
    drafts.extend([])
    assert drafts.propose(n) == expected


def test_a_bigram_table_without_text_proposes_nothing() -> None:
    assert BigramDrafts(BigramTable([])).propose(3) == []


def comparison(own: float | None, **lengths: float) -> Comparison:
    """A head of a given length, of two steps, beside controls of given lengths."""
    prompts, n = [Prompt((1, 2), "")], 0 if own is None else round(2 * own) - 2
    steps = (
        []
        if own is None
        else [StepRecord(1, 9, n, n + 1, False, (0,) * n + (1,)), StepRecord(2 + n, 9, 0, 1, False, (1,))]
    )
    response = Response("", list(range(10, 13 + n)), 2, "length", RequestMetrics(None, tuple(steps)))
    depth = count_acceptance(9, prompts, [response], len)
    assert depth.length.mean == own
    controls = [ControlAcceptance(name, 9, 5, 0, 5, *[Interval(x, x, x)] * 2) for name, x in lengths.items()]
    return Comparison(depth, tuple(controls))


def test_a_head_that_beats_no_control_is_called_not_working() -> None:
    failed = comparison(1.5, ngram=1.5, suffix=1.6, bigram=2.0)
    assert failed.verdict == (
        "Without a model, a step of spec-9 commits outside loops 1.50 (ngram), 1.60 (suffix), 2.00 (bigram) tokens, "
        "with the head 1.50: it beats none of them, so the head is not working."
    )
    assert failed.row_values() == {
        "is_working": False, "controls_beaten": [], "against_controls": failed.verdict
    }  # fmt: skip


def test_a_head_that_beats_some_controls_works_and_the_others_are_named() -> None:
    some = comparison(2.0, ngram=1.5, suffix=1.6, bigram=2.5)
    assert some.verdict.endswith("with the head 2.00: it beats ngram and suffix, but not bigram.")
    assert (some.is_working, some.beaten) == (True, ("ngram", "suffix"))
    assert comparison(3.0, ngram=1.5, suffix=1.6, bigram=2.5).verdict.endswith("it beats ngram, suffix and bigram.")


def test_without_complete_steps_there_is_no_verdict() -> None:
    nothing = comparison(None, ngram=1.5)
    assert (nothing.is_working, nothing.beaten) == (None, None)
    assert nothing.verdict.startswith("At spec-9 too few steps are complete")


def test_lengths_of_all_steps_are_compared_where_all_text_is_looped() -> None:
    looped = comparison(2.0, ngram=1.5)
    nothing = Interval(None, None, None)
    inside = Comparison(looped.depth, (ControlAcceptance("ngram", 9, 5, 0, 5, Interval(2.5, 2.5, 2.5), nothing),))
    assert not inside.leaves_out_loops
    assert inside.verdict == (
        "Without a model, a step of spec-9 commits 2.50 (ngram) tokens, with the head 2.00: it beats none of them, so "
        "the head is not working."
    )


def test_a_random_head_beside_tokens_that_repeat_is_not_working(tmp_path: Path) -> None:
    """The target leans to one token, of which a random head for another target knows nothing."""
    geometry = {"n_layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 64,
                "taps": (0, 1, 2), "convention": "input", "eos": []}  # fmt: skip
    target, _ = write_agreeing_pair(tmp_path / "one", **geometry, draft_vocab=64)
    _, head = write_random_pair(tmp_path / "other", **geometry, draft_vocab=64, seed=5)
    prompts = random_prompts([3, 9, 17], n_vocab=64)
    found = head_report((target, head), 4, prompts, 40)
    assert found.is_working is False
    assert "not working" in found.verdict


def test_the_picture_holds_the_head_and_every_control_at_every_depth(pair: Pair) -> None:
    mpl.use("agg")
    prompts = random_prompts([3, 9])
    compared = [head_report(pair, k, prompts, 16) for k in (1, 2)]
    figure, table, *_ = control_figures.controls(compared, 2)
    assert list(table["drafts"]) == ["head", *CONTROLS] * 2
    assert [line.get_label() for line in figure.axes[0].lines] == ["head", *CONTROLS]
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert drawn["head"] == [each.depth.length.mean for each in compared]
    assert drawn["suffix"] == [each.controls[1].length.mean for each in compared]
