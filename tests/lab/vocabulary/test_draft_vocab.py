"""`eagle3lab draft-vocab`: what is counted, what is kept, and heads that load and draft with the tokens they keep."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pairs import write_random_pair

from eagle3core.chat import ChatWriter
from eagle3core.checkpoint import load_draft, target_of
from eagle3core.pipeline import load_tokenizer
from lab.cli import run
from lab.errors import ExperimentError
from lab.pairs import shipped_pair
from lab.vocabulary.choose import always_kept, choose_vocabulary
from lab.vocabulary.counts import TokenCounts, count_files, count_ids

pytestmark = pytest.mark.reference

PAIR = shipped_pair()
GIVEN = ["draft-vocab", "--target", str(PAIR.target), "--draft", str(PAIR.draft)]
END = 0
CODE = "def add(first, second):\n    return first + second\n\nclass Counter:\n    '''Counts.'''\n" * 40


def kept_ids(directory: Path) -> list[int]:
    draft = load_draft(directory, target_of(PAIR.target))
    assert draft.draft_to_target is not None
    return draft.draft_to_target.tolist()  # type: ignore[no-any-return]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code.txt"
    path.write_text(CODE)
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(PAIR.target)


def test_a_head_is_cut_to_the_texts_most_frequent_tokens(
    code: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = count_files([str(code)], ChatWriter(tokenizer), 4096)
    own = kept_ids(PAIR.draft)
    assert run([*GIVEN, "--text", str(code), "--size", "12", "--out", str(tmp_path / "cut")]) == 0
    kept = kept_ids(tmp_path / "cut")
    assert len(kept) == 12
    least, others = min(counts.counts[i] for i in kept), set(own) - set(kept)
    assert all(counts.counts[i] <= least for i in others)
    told = capsys.readouterr().out
    assert "never drafted, before or after: <|endoftext|> (0)" in told
    assert f"{counts.coverage(kept):.2%} of the text" in told
    assert "12 of 1024 tokens" in told


def test_the_end_token_is_kept_of_a_whole_head_though_no_text_holds_it(code: Path, tmp_path: Path) -> None:
    target, draft = write_random_pair(
        tmp_path, vocab=4096, draft_vocab=None, own_head=False, eos=END, n_layers=4, hidden=16, heads=2, kv_heads=1,
        head_dim=8, ffn=16, taps=(0, 1, 2), convention="output",
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR.target / name, target / name)
    given = ["draft-vocab", "--target", str(target), "--draft", str(draft), "--text", str(code)]
    assert run([*given, "--size", "12", "--out", str(tmp_path / "cut")]) == 0
    cut = load_draft(tmp_path / "cut", target_of(target))
    assert cut.draft_to_target is not None
    assert cut.draft_to_target[0] == END
    assert tuple(cut.weights["lm_head.weight"].shape) == (12, 16)


def test_several_sizes_have_a_directory_each_and_smaller_ones_lie_in_larger_ones(code: Path, tmp_path: Path) -> None:
    listed = tmp_path / "counts.json"
    out = tmp_path / "cut"
    assert run([*GIVEN, "--text", str(code), "--size", "8,16", "--out", str(out), "--counts", str(listed)]) == 0
    assert set(kept_ids(out / "8")) < set(kept_ids(out / "16"))
    stored = json.loads(listed.read_text())
    assert stored["counts"] == sorted(stored["counts"], reverse=True)
    assert sum(stored["counts"]) == stored["n_tokens"]


def test_a_cut_head_is_cut_further_through_its_own_map_and_not_widened(code: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    given = ["draft-vocab", "--target", str(PAIR.target), "--text", str(code)]
    assert run([*GIVEN, "--text", str(code), "--size", "16", "--out", str(first)]) == 0
    assert run([*given, "--draft", str(first), "--size", "8", "--out", str(second), "--to", "gguf"]) == 0
    assert set(kept_ids(second)) < set(kept_ids(first))
    with pytest.raises(ExperimentError) as refusal:
        run([*given, "--draft", str(first), "--size", "17", "--out", str(tmp_path / "wider")])
    assert "the draft chooses among 16 tokens" in refusal.value.what


def test_the_standard_input_and_prompt_sets_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(CODE))
    assert run([*GIVEN, "--text", "-", "--size", "12", "--out", str(tmp_path / "read")]) == 0
    assert run([*GIVEN, "--prompts", str(PAIR.prompts), "--size", "300", "--out", str(tmp_path / "prompts")]) == 0
    assert len(kept_ids(tmp_path / "prompts")) == 300


def test_the_targets_own_answers_are_counted_in_place_of_its_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f"{line}\n" for line in Path(PAIR.prompts or "").read_text().splitlines()[:2]))
    options = ["--prompts", str(few), "--answers", "8", "--size", "4", "--dtype", "float32"]
    assert run([*GIVEN, *options, "--device", "cpu", "--out", str(tmp_path / "cut")]) == 0
    assert "16 tokens of the target's answers to 2 prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--size", "1025"], "size is 1025, the draft chooses among 1024 tokens"),
        (["--size", "900"], "were seen or are always kept"),
        (["--size", "8,8"], "--size is 8,8"),
        (["--size", "1"], "--size is 1"),
    ],
)
def test_a_size_that_cannot_be_had_is_refused_and_nothing_is_written(
    code: Path, tmp_path: Path, options: list[str], what: str
) -> None:
    with pytest.raises(ExperimentError) as refusal:
        run([*GIVEN, "--text", str(code), *options, "--out", str(tmp_path / "cut")])
    assert what in refusal.value.what
    assert not (tmp_path / "cut").exists()


def test_a_text_that_is_too_short_says_how_many_distinct_tokens_it_has(
    code: Path, tmp_path: Path, tokenizer: Any
) -> None:
    counts = count_files([str(code)], ChatWriter(tokenizer), 4096)
    with pytest.raises(ExperimentError) as refusal:
        run([*GIVEN, "--text", str(code), "--size", "900", "--out", str(tmp_path / "cut")])
    assert f"{counts.n_tokens} tokens of code.txt hold {counts.n_distinct} distinct ones" in refusal.value.what


@pytest.mark.parametrize(
    ("data", "what"), [(b"\xff\xfe\xfa", "no UTF-8"), (b"", "no token to count"), (None, "cannot be read")]
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, data: bytes | None, what: str) -> None:
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ExperimentError) as refusal:
        run([*GIVEN, "--text", str(path), "--size", "8", "--out", str(tmp_path / "cut")])
    assert what in refusal.value.what
    assert "text.txt" in refusal.value.what


def test_pieces_of_a_long_file_count_what_the_whole_does(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x = 1\n" * 30_000 + "y" * 150_000)
    counts = count_files([str(path)], ChatWriter(tokenizer), 4096)
    assert counts.counts[tokenizer("\n", add_special_tokens=False)["input_ids"][-1]] >= 29_990
    decoded = sum(len(tokenizer.decode([i])) * int(n) for i, n in enumerate(counts.counts))
    assert decoded == path.stat().st_size


def test_the_marks_of_a_chat_and_the_ends_of_the_target_are_always_kept(tmp_path: Path) -> None:
    shutil.copytree(PAIR.target, tmp_path / "target")
    settings = json.loads((tmp_path / "target" / "tokenizer_config.json").read_text())
    marks = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}<|over|>\n{% endfor %}"
    (tmp_path / "target" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": marks}))
    tokenizer = load_tokenizer(tmp_path / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|over|>", "<|never|>"]})
    kept = always_kept(ChatWriter(tokenizer), (END, 7))
    assert set(kept) == {END, 7, *tokenizer.convert_tokens_to_ids(["<|turn|>", "<|over|>"])}


@given(st.lists(st.integers(0, 40), min_size=4, max_size=40), st.data())
def test_the_kept_are_the_most_frequent_of_the_drafts_own_and_what_is_always_kept(
    counted: list[int], data: st.DataObject
) -> None:
    counts = TokenCounts(np.array(counted), "a text")
    ids = st.sets(st.integers(0, len(counted) - 1))
    own, always = data.draw(ids), data.draw(ids)
    size = data.draw(st.integers(2, len(counted)))
    n_seen = len({i for i in own if counted[i]} | (always & own))
    if size > n_seen or size < len(always & own):
        with pytest.raises(ExperimentError):
            choose_vocabulary(counts, [size], own, always)
        return
    [kept] = choose_vocabulary(counts, [size], own, always)
    assert kept == sorted(set(kept))
    assert len(kept) == size
    assert always & own <= set(kept) <= own
    chosen, left = set(kept) - always, own - set(kept)
    assert all(counted[i] > 0 for i in chosen)
    assert max((counted[i] for i in left), default=0) <= min((counted[i] for i in chosen), default=41)


def test_what_counts_leave_equal_or_have_not_seen_is_ranked_by_the_others() -> None:
    others = TokenCounts(np.array([1, 0, 9, 5, 0]), "a text")
    counts = TokenCounts(np.array([2, 2, 2, 0, 0]), "answers", others)
    assert counts.by_frequency(range(5)) == [2, 0, 1, 3]
    assert counts.n_distinct == 4
    assert counts.coverage([2, 3]) == pytest.approx(1 / 3)


def test_an_id_outside_the_targets_vocabulary_names_the_tokenizer() -> None:
    with pytest.raises(ExperimentError) as refusal:
        count_ids([[1, 12]], 12, "a text")
    assert "token 12" in refusal.value.what
    assert "tokenizer" in refusal.value.remedy
