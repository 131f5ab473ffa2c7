"""A bench of forced acceptance lengths: named in rows, records, lines and pictures, refused beside what contradicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_bench import SCENARIO

from lab.errors import ExperimentError
from lab.options.bench import BenchOptions
from lab.probes.bench import command, view
from lab.probes.bench.record import record_of
from lab.probes.bench.results import line_of, wrong_tokens
from lab.probes.bench.run import Bench

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_forced_length_names_itself_in_rows_records_lines_and_pictures() -> None:
    rows = Bench(replace(SCENARIO, peers=(), forced=2.5), tell=lambda _: None).run().rows
    label = "forced to 2.5 tokens a step"
    base, forced = rows
    assert "forced" not in base.name
    assert "acceptance" not in base.parameters
    assert forced.name.endswith("_forced_to_2.5_tokens_a_step")
    assert forced.parameters["acceptance"] == forced.values["acceptance"] == label
    assert forced.parameters["share"] is None
    record = record_of(forced)
    assert record["eagle_speculation"]["acceptance"] == label
    assert record["scenario"]["name"] == forced.name
    # Nobody's text is right or wrong, and no planted acceptance is spoken of.
    assert forced.values["n_divergent"] is forced.values["n_wrong_requests"] is None
    assert not wrong_tokens(forced.values)
    assert "speedup_at_dial" not in forced.values
    assert label in line_of(forced.name, forced.values)
    table = view.rates_table(view.BenchRows("here", tuple(rows)))
    assert set(table["who"]) == {"engine", f"engine, {label}"}
    figure, *_ = view.rates(table, "stored")
    [axes] = figure.axes
    assert label in {text.get_text().removeprefix("engine, ") for text in axes.get_legend().get_texts()}
    # Beside another project's numbers stand those of the engine's own acceptance alone.
    assert 3 not in set(view.earlier_table(table, "here").query("machine == 'here'")["spec_k"])


@pytest.mark.slow
def test_whole_forced_lengths_are_measured_as_they_are_forced() -> None:
    rows = Bench(replace(SCENARIO, peers=(), forced=3.0, tokens=31), tell=lambda _: None).run().rows
    assert rows[1].values["acceptance_length"] == 3.0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"forced_length": 2.0, "forced_drafts": 1.0}, "--forced-length and --forced-drafts were given together"),
        ({"forced_length": 2.0, "acceptance_length": 3.0}, "--forced-length and --acceptance-length were given"),
        ({"forced_drafts": 2.0, "share": 0.5}, "--forced-drafts and --share were given together"),
        ({"forced_length": 3.5, "spec": "0,2,5"}, "a forced length of 3.5 with --spec 0,2,5"),
        ({"forced_drafts": 1.0, "spec": "0"}, "a forced length of 2 with --spec 0"),
    ],
)
def test_a_forced_length_is_refused_with_what_contradicts_it(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        BenchOptions(**options)
    assert what in caught.value.what


def test_both_ways_of_counting_force_one_scenario_without_peers() -> None:
    by_length, by_drafts = (
        command.scenario_of(BenchOptions(device="cpu", **{name: value}))
        for name, value in (("forced_length", 2.5), ("forced_drafts", 1.5))
    )
    assert by_length == by_drafts
    assert (by_length.forced, by_length.peers) == (2.5, ())
    assert command.scenario_of(BenchOptions(device="cpu")).forced is None
    with pytest.raises(ExperimentError, match="beside a forced length"):
        replace(SCENARIO, forced=2.0)
