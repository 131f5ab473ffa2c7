"""Measured acceptance is held against an independent reference, which contradicts an engine with a bug."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from agreeing_pairs import write_agreeing_pair
from random_pairs import write_random_pair
from rings import slow_from

from lab.acceptance.counts import (
    DepthAcceptance,
)
from lab.acceptance.measure import AcceptanceReport, measure_acceptance
from lab.acceptance.reference import ReferenceReport, check_acceptance
from lab.errors import ExperimentError
from lab.pairs.prompts import Prompt, prompts_from_ids

pytestmark = pytest.mark.reference

# A vocabulary of six, four of them drafted: random weights then agree often enough for chains to be accepted.
VOCAB, DRAFT_VOCAB = 6, 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target and draft over the tiny vocabulary."""
    torch.set_num_threads(1)
    return write_random_pair(tmp_path_factory.mktemp("pair"), vocab=VOCAB, draft_vocab=DRAFT_VOCAB)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Four prompts of different lengths in two categories."""
    random = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCAB, (9 + i,), generator=random).tolist() for i in range(4)]
    return [*prompts_from_ids(ids[:2], "code"), *prompts_from_ids(ids[2:], "prose")]


@pytest.fixture(scope="module")
def report(pair: tuple[Path, Path], prompts: list[Prompt]) -> AcceptanceReport:
    """Both depths measured once."""
    return measure_acceptance(*pair, prompts, (1, 3), max_new_tokens=40, ignore_eos=True, batch=3)


def checked(pair: tuple[Path, Path], prompts: Sequence[Prompt], depth: DepthAcceptance, dtype: str) -> ReferenceReport:
    return check_acceptance(*pair, prompts, depth.responses, depth.k, dtype=dtype)


def test_the_engine_is_counted_as_it_counts_itself(report: AcceptanceReport, prompts: list[Prompt]) -> None:
    for depth in report.depths:
        infos = [r.req_metrics.spec_info for r in depth.responses]
        assert depth.histogram == tuple(
            sum(info.accepted_histogram[a] for info in infos if info) for a in range(depth.k + 1)
        )
        assert depth.n_tokens == 40 * len(prompts)
        assert depth.n_contradictions == 0
        assert sum(c.n_steps for c in depth.categories) == depth.n_steps
    assert [list(r.token_ids) for r in report.at(1).responses] == [list(r.token_ids) for r in report.at(3).responses]
    assert sum(report.at(3).histogram[2:]) > 0, "the pair must accept chains, or nothing here is tested"
    with pytest.raises(ExperimentError, match="spec-2 was not measured"):
        report.at(2)


def test_the_same_run_gives_the_same_report(
    pair: tuple[Path, Path], prompts: list[Prompt], report: AcceptanceReport
) -> None:
    again = measure_acceptance(*pair, prompts, (3,), max_new_tokens=40, ignore_eos=True, batch=4)
    assert again.at(3).histogram == report.at(3).histogram
    assert again.at(3).length == report.at(3).length


@pytest.mark.parametrize("k", [1, 3])
def test_measured_acceptance_equals_the_reference_expectation(
    pair: tuple[Path, Path], prompts: list[Prompt], report: AcceptanceReport, k: int
) -> None:
    reference = checked(pair, prompts, report.at(k), "float32")
    assert reference.passed()
    assert reference.bugs == ()
    assert reference.n_steps == report.at(k).n_steps
    assert reference.measured == pytest.approx(report.at(k).length.mean)
    if reference.n_near_ties == 0:
        assert reference.expected == reference.measured


def test_bf16_differs_from_its_reference_by_rounding_alone(tmp_path: Path) -> None:
    pair = write_agreeing_pair(tmp_path, n_layers=7, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(2)
    prompts = prompts_from_ids([torch.randint(3, 512, (7 + 5 * i,), generator=random).tolist() for i in range(4)])
    report = measure_acceptance(*pair, prompts, (3,), max_new_tokens=32, ignore_eos=True, dtype="bfloat16")
    reference = checked(pair, prompts, report.at(3), "bfloat16")
    assert reference.bugs == ()
    assert sum(d.accepted for d in reference.decisions) >= 10, "the pair must accept drafts, or nothing is tested"
    assert reference.row_values()["n_positions"] == len(reference.decisions)


def test_fp64_leaves_no_room_for_rounding(pair: tuple[Path, Path], prompts: list[Prompt]) -> None:
    report = measure_acceptance(*pair, prompts[:2], (2,), max_new_tokens=16, ignore_eos=True, dtype="float64")
    reference = checked(pair, prompts[:2], report.at(2), "float64")
    assert reference.near_tie == 0.0
    assert reference.passed(0.0)


@pytest.mark.parametrize("fault", slow_from(1, ["stale_draft_kv", "wrong_tap", "normed_feedback"]))
def test_a_bug_in_the_draft_contradicts_the_reference(
    pair: tuple[Path, Path], prompts: list[Prompt], fault: str
) -> None:
    broken = measure_acceptance(*pair, prompts, (3,), max_new_tokens=40, ignore_eos=True, fault=fault)
    reference = checked(pair, prompts, broken.at(3), "float32")
    assert not reference.passed()
    assert len(reference.bugs) >= 2
    assert "contradicts the Hugging Face reference" in reference.verdict


def test_unusable_arguments_are_refused(pair: tuple[Path, Path], prompts: list[Prompt]) -> None:
    for bad in ({"prompts": []}, {"ks": ()}, {"ks": (0,)}, {"max_new_tokens": 1}):
        arguments = {"prompts": prompts, "ks": (1,), **bad}
        with pytest.raises(ExperimentError, match="at least one prompt"):
            measure_acceptance(*pair, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ExperimentError, match="0 responses to 4 prompts"):
        check_acceptance(*pair, prompts, [], 1)
