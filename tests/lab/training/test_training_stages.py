"""The stages of training one by one: the loop stops and resumes exactly, and training sees what decoding will."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_pairs import write_random_pair

from eagle3core.config import EngineConfig, GenerationConfig
from eagle3core.engine import Engine
from eagle3core.speculative import SpeculativeConfig
from lab.acceptance import loops
from lab.errors import RunFailed
from lab.training import draft as drafts
from lab.training import evaluation, generation, target, teaching
from lab.training.fit import Fit, Plan
from lab.training.progress import Reporter
from lab.training.sizes import SIZES, StageSize

pytestmark = pytest.mark.reference

TINY = SIZES["tiny"]


def _random_target(folder: Path) -> tuple[Path, Any]:
    """A target of the tiny geometry with random weights: its greedy text varies."""
    shape = {"hidden": TINY.hidden, "heads": 1, "kv_heads": 1, "head_dim": 64, "ffn": TINY.ffn, "vocab": TINY.vocab}
    path, _ = write_random_pair(folder, **shape, tie=True, eos=0)
    return path, target.load_target(path, torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _random_target(tmp_path_factory.mktemp("target"))[1]


def _line_fit(state: Path, on_step: int | None = None) -> tuple[torch.nn.Linear, Fit]:
    """A regression that sends itself an interrupt in the middle of step `on_step`."""
    torch.manual_seed(0)
    model, taken = torch.nn.Linear(4, 1), []

    def loss(random: torch.Generator) -> torch.Tensor:
        taken.append(1)
        if len(taken) == on_step:
            os.kill(os.getpid(), signal.SIGINT)
        x = torch.randn(8, 4, generator=random)
        return (model(torch.nn.functional.dropout(x, 0.2, model.training)) - x.sum(1, keepdim=True)).square().mean()

    def evaluate() -> dict[str, float]:
        return {"loss": (model.weight - 1.0).square().sum().item()}

    stage = StageSize(steps=40, batch=8, window=1, peak_lr=0.05, weight_decay=0.0)
    plan = Plan(stage="line", size=stage, seed=3, evaluate_every=10, save_every=1000)
    return model, Fit(model, loss, evaluate, plan, state, Reporter(bar=False))


def test_ctrl_c_ends_after_the_step_at_hand_and_the_next_run_goes_on_there(tmp_path: Path) -> None:
    whole, fit = _line_fit(tmp_path / "whole.pt")
    fit.run()
    _, fit = _line_fit(tmp_path / "parts.pt", on_step=17)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RunFailed, match="interrupted after step 17"):
        fit.run()
    assert signal.getsignal(signal.SIGINT) is before
    parts, fit = _line_fit(tmp_path / "parts.pt")
    course = fit.run()
    assert course.step == 40
    assert torch.equal(parts.weight, whole.weight)


def test_the_weights_with_the_lowest_validation_loss_are_kept(tmp_path: Path) -> None:
    model, fit = _line_fit(tmp_path / "line.pt")
    seen: list[tuple[float, torch.Tensor]] = []

    def worse_every_time() -> dict[str, float]:
        seen.append((float(len(seen)), model.weight.detach().clone()))
        return {"loss": seen[-1][0]}

    fit.evaluate = worse_every_time
    course = fit.run()
    assert course.best == {"loss": 0.0, "step": 10}
    assert torch.equal(model.weight, seen[0][1])
    assert not torch.equal(seen[0][1], seen[-1][1])


def test_a_loss_that_is_no_number_ends_the_run_with_its_step(tmp_path: Path) -> None:
    model, fit = _line_fit(tmp_path / "line.pt")
    fit.step_loss = lambda random: model.weight.sum() * float("nan")
    with pytest.raises(RunFailed, match="the loss is nan at step 10"):
        fit.run()


def test_a_time_limit_ends_a_stage_with_its_learning_rate_spent(tmp_path: Path) -> None:
    _, fit = _line_fit(tmp_path / "line.pt")
    stage = StageSize(steps=10**9, batch=8, window=1, peak_lr=0.05, weight_decay=0.0)
    fit.plan = Plan(stage="line", size=stage, seed=3, evaluate_every=10**6, save_every=10**6, seconds=0.5)
    course = fit.run()
    assert 0.5 <= course.seconds < 5.0
    assert course.step < 10**6
    assert course.best["step"] == course.step  # the last step is validated


@pytest.mark.slow
def test_walking_the_chained_steps_counts_what_the_engine_accepts(tmp_path: Path) -> None:
    size = TINY
    folder, model = _random_target(tmp_path)
    random = torch.Generator().manual_seed(1)  # prompts whose drafts are refused at once, in part and not at all
    prompts = torch.randint(1, size.vocab, (4, 20), generator=random).tolist()
    written = generation.continue_greedily(model, prompts, 40)
    trained = _half_taught(model, torch.cat([torch.tensor(prompts), written], dim=1))
    drafts.save_draft(trained, size, tmp_path / "taught")
    stored = drafts.load_draft(tmp_path / "taught", size, model)
    measured = evaluation.measure_acceptance(model, stored, prompts, n_new=40)
    speculative = SpeculativeConfig(model=str(tmp_path / "taught"), num_speculative_tokens=3)
    config = EngineConfig(dtype="float32", device="cpu", session_len=256, speculative_config=speculative)
    engine = Engine.from_pretrained(str(folder), config)
    responses = engine.generate(prompts, GenerationConfig(max_new_tokens=40, ignore_eos=True))
    assert [response.token_ids for response in responses] == written.tolist()
    steps = [step for response in responses for step in response.req_metrics.steps]
    accepted = [step.n_accepted for step in steps if step.start + step.n_draft < 40]  # complete ones
    assert {0, 3} < set(accepted)  # the draft is neither always right nor always wrong
    assert measured.length == pytest.approx(1 + np.mean(accepted), abs=1e-6)


def _half_taught(model: Any, lessons: torch.Tensor) -> drafts.Draft:
    """A draft that knows some of these sequences by heart."""
    ids = torch.from_numpy(np.argsort(-np.bincount(lessons.flatten().numpy(), minlength=512), kind="stable")[:128])
    draft = drafts.build_draft(TINY, model, ids.sort().values, seed=0)
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    for _ in range(60):
        losses, _ = teaching.chained_losses(draft, model, lessons, torch.ones_like(lessons).float(), 3)
        torch.autograd.backward(teaching.decayed(losses))
        optimizer.step()
        optimizer.zero_grad()
    return draft


def _toy_draft() -> tuple[drafts.Draft, torch.Tensor, torch.Tensor]:
    size = TINY
    embedding = torch.randn(size.vocab, size.hidden)
    model = drafts.Draft(size, embedding, torch.arange(0, size.vocab, size.vocab // size.draft_vocab))
    return model, torch.randn(1, 12, 3 * size.hidden), torch.randint(0, size.vocab, (1, 16))


def test_a_chained_step_sees_the_prefix_and_its_own_chain_and_nothing_later() -> None:
    model, taps, tokens = _toy_draft()
    with torch.no_grad():
        before = model(taps, tokens, 4)
        later = taps.clone()
        later[:, 6:] += 1.0  # states after root 5
        after = model(later, tokens, 4)
        fed = tokens.clone()
        fed[:, 9] = (fed[:, 9] + 1) % 512  # token 9 enters root 5 at step 3 (5 + 1 + 3), no sooner
        other = model(taps, fed, 4)
    for step in range(4):
        torch.testing.assert_close(after[step][:, :6], before[step][:, :6])
    for step in range(3):
        torch.testing.assert_close(other[step][:, 5], before[step][:, 5])
    assert not torch.allclose(other[3][:, 5], before[3][:, 5])
    assert not torch.allclose(after[0][:, 6], before[0][:, 6])


def test_a_position_whose_token_the_draft_cannot_say_has_no_loss(model: Any) -> None:
    tokens = torch.randint(0, 512, (2, 40))
    _, logits = teaching.taps_and_logits(model, tokens)
    said = logits.argmax(-1).flatten().unique().tolist()
    silent = sorted(set(range(512)) - set(said))
    weights = torch.ones(2, 40)
    blind = drafts.build_draft(TINY, model, torch.tensor(silent[:128]), seed=0)
    losses, matches = teaching.chained_losses(blind, model, tokens, weights, 3)
    assert [loss.item() for loss in losses] == [0.0, 0.0, 0.0]
    assert matches[0].shape == (2, 40 - 1 - 3)
    seeing = drafts.build_draft(TINY, model, torch.tensor(sorted([*said, *silent][:128])), seed=0)
    losses, _ = teaching.chained_losses(seeing, model, tokens, weights, 3)
    assert all(loss.item() > 0 for loss in losses)


def test_the_draft_vocabulary_is_what_the_target_says_most_outside_its_loops() -> None:
    rows = np.random.default_rng(0).integers(0, 100, size=(4, 200))  # 100 frequent ids
    rows[:, 150:] = 511  # a loop that says one token more often than any other
    rows[:, :10] = np.arange(300, 310)  # openings, which the target did not say
    ids = teaching.choose_vocabulary(rows, np.full(4, 10), TINY)
    assert len(ids) == TINY.draft_vocab
    assert torch.equal(ids, ids.unique())
    assert set(range(100)) <= set(ids.tolist())
    assert not set(range(300, 310)) & set(ids.tolist())


def test_prompts_of_different_lengths_continue_as_each_would_alone(model: Any) -> None:
    prompts = [[5, 6, 7], list(range(40, 60)), [9] * 11]
    together = generation.continue_greedily(model, prompts, 12)
    for prompt, row in zip(prompts, together, strict=True):
        assert torch.equal(generation.continue_greedily(model, [prompt], 12)[0], row)


def test_looped_tokens_of_many_rows_are_those_of_each() -> None:
    random = np.random.default_rng(4)
    rows = random.integers(0, 3, size=(30, 90))  # three tokens: 4-grams repeat often
    rows[3] = 1
    for gram in (4, 16):
        expected = [loops.looped_tokens([], row.tolist(), gram) for row in rows]
        assert generation.looped_tokens(rows, gram).tolist() == expected


def test_walking_by_hand() -> None:
    right = np.array(
        [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]], dtype=bool
    )
    # Prompt of 2: token 2 is the first root, so row 1 first (accepts 1, commits tokens 3 and 4), then row 3 (accepts 3,
    # commits 5 to 8), then row 7, whose drafts and bonus token end at 12 of 13.
    assert evaluation.walk(right, n_prompt=2, n_all=13) == [(3, 1), (5, 3), (9, 3)]
    assert evaluation.walk(right, n_prompt=2, n_all=12) == [(3, 1), (5, 3)]


def test_the_loss_of_a_stream_is_hugging_faces_own(model: Any) -> None:
    stream = torch.randint(0, 512, (50,))
    with torch.no_grad():
        whole = model(stream[None], labels=stream[None]).loss.item()
    assert target.stream_loss(model, stream, window=64) == pytest.approx(whole, rel=1e-5)
    halves = [model(part[None], labels=part[None]).loss.item() for part in (stream[:25], stream[24:49], stream[48:])]
    by_window = (24 * halves[0] + 24 * halves[1] + halves[2]) / 49
    assert target.stream_loss(model, stream, window=24) == pytest.approx(by_window, rel=1e-5)
