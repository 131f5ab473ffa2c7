"""Heads broken in their weights, targets changed under them: the lamp is red, and right about what mending gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from broken_weights import (
    dead_head,
    half_head,
    noisy_head,
    random_embedding,
    random_head,
    rare_vocabulary,
    rotated_target,
)
from broken_weights import rounded_target as rounded
from eagle_pairs import write_eagle_pair
from random_pairs import rewrite_config
from safetensors.torch import load_file, save_file

from lab.doctor.draft.case import Case
from lab.doctor.draft.evidence import (
    MOST_ROWS,
    edge_ratio,
    is_noise,
    levels_a_slice,
    rotation_between,
    row_cosine,
    unlike_rows,
)
from lab.doctor.draft.lamp import Finding
from lab.doctor.draft.lamps.changed_target import look_at_target, signs_of_change, unturned
from lab.doctor.draft.lamps.data import DATA, look_at_coverage, look_at_life, look_at_metric
from lab.doctor.draft.lamps.weights import WEIGHTS, look_at_method, look_at_tables, look_at_training
from lab.pairs import shipped_pair
from lab.pairs.prompts import prompts_for

pytestmark = pytest.mark.reference
SHIPPED = shipped_pair()


@pytest.fixture(scope="module")
def healthy() -> Case:
    """The shipped pair with its text, which is that of every head of its target."""
    prompts, _ = prompts_for(SHIPPED.target, limit=10, max_tokens=96)
    case = Case(SHIPPED.target, SHIPPED.draft, tuple(prompts), max_new_tokens=56, device="cpu")
    case.text  # noqa: B018 (made once, for all tests)
    return case


def with_draft(case: Case, draft: Path) -> Case:
    other = replace(case, draft=draft)
    other.__dict__ |= {name: case.__dict__[name] for name in ("plain", "text", "target_files") if name in case.__dict__}
    return other


def of_files(target: Path, draft: Path) -> Case:
    return Case(target, draft, device="cpu")


def after(finding: Finding) -> float:
    assert finding.colour == "red", finding.said
    assert finding.repair is not None
    assert finding.repair.after is not None
    return finding.repair.after


def test_noise_of_any_distribution_is_told_from_what_was_trained() -> None:
    random = torch.Generator().manual_seed(0)
    for table in (torch.randn(700, 90, generator=random), torch.rand(90, 700, generator=random) - 0.5):
        assert is_noise(0.01 * table)
        assert not is_noise(table + 1.0)  # rows that share a direction
    assert edge_ratio(load_file(SHIPPED.draft / "model.safetensors")["lm_head.weight"]) > 2
    assert edge_ratio(torch.zeros(40, 30)) == 0.0


def test_a_table_flatter_than_noise_is_none_and_rows_are_looked_at_over_the_whole_table() -> None:
    random = torch.Generator().manual_seed(0)
    flat, _ = torch.linalg.qr(torch.randn(64, 64, generator=random))
    assert edge_ratio(flat) == pytest.approx(0.5, abs=0.01)
    assert not is_noise(flat)
    table = torch.randn(3 * MOST_ROWS, 16, generator=random)
    half = table.clone()
    half[len(table) // 2 :] *= -1
    assert row_cosine(table, half) == pytest.approx(0.0, abs=0.01)


def test_rows_unlike_the_targets_are_found_from_a_fiftieth_on_and_those_it_leaves_empty_are_none() -> None:
    random = torch.Generator().manual_seed(0)
    table = torch.randn(100, 64, generator=random)
    for n_turned, found in ((2, []), (3, [0, 1, 2])):
        targets = table.clone()
        targets[:n_turned] *= -1
        targets[50:60] = 0
        assert unlike_rows(table, targets, 0.5).nonzero()[:, 0].tolist() == found


def test_a_rotation_is_believed_only_where_it_turns_rows_that_it_was_not_fitted_on() -> None:
    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(64, 32, generator=random) for _ in range(2))
    turn, _ = torch.linalg.qr(torch.randn(32, 32, generator=random))
    assert rotation_between(first, first @ turn)[1] == pytest.approx(1.0, abs=1e-3)
    assert abs(rotation_between(first, second)[1]) < 0.2


@pytest.mark.parametrize("variant", ["zeros", "normal"])
def test_rows_that_were_never_loaded_are_found_beside_those_that_were(
    tmp_path: Path, healthy: Case, variant: str
) -> None:
    case = with_draft(healthy, half_head(SHIPPED.draft, tmp_path / "draft", variant))
    assert case.before < 0.95 * healthy.before
    finding = look_at_tables(case)
    assert after(finding) == pytest.approx(healthy.before, rel=0.1)
    assert f"{512} of 1024 rows of lm_head.weight have nothing of the target's" in finding.said
    assert "rows" not in look_at_tables(replace(healthy, prompts=())).said.partition("head")[0], "of a whole one"


@pytest.mark.parametrize("variant", ["normal", "uniform", "zeros"])
def test_a_head_of_noise_or_zeros_is_seen_without_running_it(tmp_path: Path, variant: str) -> None:
    draft = random_head(SHIPPED.draft, tmp_path / "draft", variant)
    finding = look_at_tables(of_files(SHIPPED.target, draft))
    assert finding.colour == "red"
    assert "lm_head.weight" in finding.said


@pytest.mark.parametrize("variant", ["normal", "uniform"])
def test_an_embedding_of_noise_is_seen_without_running_it(tmp_path: Path, variant: str) -> None:
    draft = random_embedding(SHIPPED.target, SHIPPED.draft, tmp_path / "draft", variant)
    finding = look_at_tables(of_files(SHIPPED.target, draft))
    assert finding.colour == "red"
    assert finding.said.startswith("embed_tokens.weight")


def test_the_shipped_head_is_trained_and_of_its_kind_as_far_as_files_say() -> None:
    case = of_files(SHIPPED.target, SHIPPED.draft)
    colours = {lamp.name: lamp.look(case).colour for lamp in (*WEIGHTS, *DATA)}
    assert colours["random_tensors"] == colours["method"] == "green"
    assert "red" not in colours.values()


def test_an_eagle_1_head_whose_config_says_eagle_3_is_of_the_other_method(tmp_path: Path) -> None:
    target, draft = write_eagle_pair(tmp_path)
    assert look_at_method(of_files(target, draft)).colour == "green"
    assert look_at_method(replace(of_files(target, draft), method="eagle3")).colour == "red"
    rewrite_config(draft, architectures=["LlamaForCausalLMEagle3"])
    finding = look_at_method(of_files(target, draft))
    assert finding.repair is not None
    assert finding.repair.change == "SpeculativeConfig(method='eagle')"
    wrong = look_at_method(replace(of_files(SHIPPED.target, SHIPPED.draft), method="eagle"))
    assert wrong.repair is not None
    assert wrong.repair.change == "SpeculativeConfig(method='eagle3')"


@pytest.mark.parametrize("hadamard", [False, True])
def test_the_rotation_of_a_target_is_found_from_the_rows_of_its_head(tmp_path: Path, hadamard: bool) -> None:
    target = rotated_target(SHIPPED.target, tmp_path / "target", seed=7, hadamard=hadamard)
    found = unturned(of_files(target, SHIPPED.draft))
    assert found is not None
    turned = found[0].weights["embed_tokens.weight"]
    original = load_file(SHIPPED.target / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.nn.functional.cosine_similarity(turned, original).mean() > 0.9
    assert "norm gain of the target is 1" in signs_of_change(of_files(target, SHIPPED.draft))
    assert unturned(of_files(SHIPPED.target, SHIPPED.draft)) is None


def test_four_bits_a_weight_are_seen_in_the_files(tmp_path: Path) -> None:
    for group in (32, 128):
        target = rounded(SHIPPED.target, tmp_path / f"target{group}", group=group)
        assert "4 bits" in signs_of_change(of_files(target, SHIPPED.draft))
    assert not signs_of_change(of_files(SHIPPED.target, SHIPPED.draft))
    assert levels_a_slice(torch.randn(8, 64)) == 32
    assert levels_a_slice((torch.arange(64) % 16).float().expand(8, 64)) == 16
    assert levels_a_slice(torch.zeros(8, 31)) == 32, "too narrow to tell"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["normal", "permuted"])
def test_a_lost_head_is_mended_by_the_targets_rows_as_foretold(healthy: Case, tmp_path: Path, variant: str) -> None:
    draft = random_head(SHIPPED.draft, tmp_path / "draft", variant)
    case = with_draft(healthy, draft)
    foretold = after(look_at_tables(case))
    rows = load_file(SHIPPED.target / "model.safetensors")["model.embed_tokens.weight"]
    weights = load_file(draft / "model.safetensors")
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    save_file({**weights, "lm_head.weight": rows[ids].contiguous()}, draft / "model.safetensors")
    assert with_draft(healthy, draft).before == pytest.approx(foretold, rel=0.03)
    assert foretold > case.before + 0.5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["normal", "permuted"])
def test_a_lost_embedding_is_mended_by_the_targets_as_foretold(healthy: Case, tmp_path: Path, variant: str) -> None:
    case = with_draft(healthy, random_embedding(SHIPPED.target, SHIPPED.draft, tmp_path / "draft", variant))
    assert after(look_at_tables(case)) == pytest.approx(healthy.before, rel=0.03)


@pytest.mark.slow
def test_a_rotated_target_costs_what_the_unrotated_one_gives(healthy: Case, tmp_path: Path) -> None:
    target = rotated_target(SHIPPED.target, tmp_path / "target")
    case = replace(healthy, target=target)
    assert after(look_at_target(case)) == pytest.approx(healthy.before, rel=0.1)
    assert case.before < 1.2
    beside = replace(case, reference_target=SHIPPED.target)
    assert after(look_at_target(beside)) == pytest.approx(healthy.before, rel=0.01)


@pytest.mark.slow
def test_a_target_rounded_so_far_that_its_text_is_another_is_told_beside_the_one_it_was(tmp_path: Path) -> None:
    prompts, _ = prompts_for(SHIPPED.target, limit=16, max_tokens=200)
    target = rounded(SHIPPED.target, tmp_path / "target", bits=3)
    case = Case(target, SHIPPED.draft, tuple(prompts), device="cpu", reference_target=SHIPPED.target)
    finding = look_at_target(case)
    assert "over the reference's own text" in finding.said
    assert after(finding) > 1.2 * case.before


@pytest.mark.slow
def test_a_head_that_lacks_the_frequent_tokens_gets_back_what_they_gave(healthy: Case, tmp_path: Path) -> None:
    answers = torch.tensor([token for answer in healthy.text.answers for token in answer])
    for n in (12, 64):
        frequent = answers.bincount().argsort(descending=True)[:n]
        case = with_draft(healthy, rare_vocabulary(SHIPPED.draft, tmp_path / f"draft{n}", frequent))
        assert after(look_at_coverage(case)) == pytest.approx(healthy.before, rel=0.1)
    assert look_at_coverage(healthy).colour == "green"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["constant", "body"])
def test_a_head_that_knows_nothing_is_beaten_by_a_look_up(healthy: Case, tmp_path: Path, variant: str) -> None:
    case = with_draft(healthy, dead_head(SHIPPED.draft, tmp_path / "draft", variant))
    assert after(look_at_life(case)) > case.before
    assert look_at_life(healthy).colour == "green"


@pytest.mark.slow
def test_a_claim_of_another_definition_is_named(healthy: Case) -> None:
    assert healthy.by_engine is not None
    rate = healthy.by_engine.row_values()["mean_acceptance_rate"]
    finding = look_at_metric(replace(with_draft(healthy, healthy.draft), claimed=round(rate, 2)))
    assert "acceptance rate (accepted over drafted tokens)" in finding.said
    assert finding.colour == "red"
    in_per_cent = look_at_metric(replace(with_draft(healthy, healthy.draft), claimed=round(100 * rate, 1)))
    assert in_per_cent.colour == "red"
    assert in_per_cent.repair is not None
    assert "with the acceptance rate (accepted over drafted tokens) here" in in_per_cent.repair.change
    for claimed in (round(healthy.before, 2), 17.0):
        assert look_at_metric(replace(with_draft(healthy, healthy.draft), claimed=claimed)).colour == "green"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.6, 0.8])
def test_a_head_that_was_trained_too_little_gains_by_a_refit_on_other_texts(
    healthy: Case, tmp_path: Path, noise: float
) -> None:
    case = with_draft(healthy, noisy_head(SHIPPED.draft, tmp_path / "draft", noise))
    assert after(look_at_training(case)) > 1.1 * case.before
    assert look_at_training(healthy).colour == "green"
