"""Prompt sets are read as they are published; what they hold no question in is skipped, counted and told."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import letter_tokenizer

from lab.errors import ExperimentError
from lab.pairs import prompt_file
from lab.pairs.prompt_file import read_prompt_file
from lab.pairs.prompts import load_prompt_set, load_prompts, next_turn, prompts_for

pytestmark = pytest.mark.reference

TEMPLATE = "{% for m in messages %}{% if m.role == 'user' %}a{% else %}b{% endif %} {{ m.content }} {% endfor %}"
# One entry of each set in the shape of its publisher, and the question that is made of it.
SETS: dict[str, tuple[dict[str, Any], str]] = {
    "MT-bench": ({"question_id": 81, "category": "", "turns": ["q", "r"], "reference": []}, "q"),
    "Spec-Bench": ({"question_id": 1, "category": "qa", "turns": ["q"]}, "q"),
    "SPEED-Bench": ({"question_id": "s1", "category": "coding", "sub_category": "x", "turns": ["q"]}, "q"),
    "ShareGPT": ({"id": "a_0", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}, "q"),
    "SpecForge": ({"id": "1", "conversations": [{"role": "user", "content": "q"}]}, "q"),
    "UltraChat": ({"prompt": "q", "prompt_id": "f", "messages": [{"role": "user", "content": "q"}]}, "q"),
    "WildChat": ({"conversation_hash": "h", "conversation": [{"role": "user", "content": "q", "toxic": False}]}, "q"),
    "LMSYS-Chat": ({"conversation_id": "c", "conversation": [{"role": "user", "content": "q"}]}, "q"),
    "GSM8K": ({"question": "q", "answer": "#### 4"}, "q"),
    "MBPP": ({"task_id": 2, "text": "q", "code": "def f(): 0", "test_list": []}, "q"),
    "MBPP, sanitized": ({"task_id": 2, "prompt": "q", "code": "def f(): 0", "test_imports": []}, "q"),
    "MATH-500": ({"problem": "q", "solution": "s", "answer": "4", "subject": "Algebra", "unique_id": "u"}, "q"),
    "Alpaca": ({"instruction": "q", "input": "i", "output": "o", "text": "q i o"}, "q\n\ni"),
    "AlpacaEval": ({"dataset": "koala", "instruction": "q", "output": "o", "generator": "g"}, "q"),
    "CNN/DailyMail": ({"article": "q", "highlights": "h", "id": "0"}, "Summarize: q"),
}
SHAREGPT = [
    {"id": "0", "conversations": []},
    {"id": "1", "conversations": [{"from": "gpt", "value": "r"}, {"from": "human", "value": "q"}]},
    {"id": "2", "conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "r"}]},
    {"id": "3", "conversations": [{"from": "human", "value": "q"}]},
    {"id": "4", "conversations": [{"from": "human", "value": None}]},
    {"id": "5", "conversations": None},
    {"id": "6", "conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "q"}]},
]


def write(tmp_path: Path, *entries: dict[str, Any], name: str = "set.jsonl") -> Path:
    path = tmp_path / name
    data = "\n".join(map(json.dumps, entries)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", SETS)
def test_an_entry_of_a_published_set_becomes_its_question(tmp_path: Path, name: str) -> None:
    entry, question = SETS[name]
    (written,) = read_prompt_file(write(tmp_path, entry)).prompts
    assert written.content == [{"role": "user", "content": question}]
    published = [entry[key] for key in ("category", "subject", "dataset") if entry.get(key)]
    assert written.category == (published[0] if published else "uncategorised")
    ids = [value for key, value in entry.items() if key.endswith(("id", "hash"))]
    assert written.id == (str(ids[0]) if ids else "1")


def test_a_humaneval_problem_is_a_text_to_go_on_with(tmp_path: Path) -> None:
    entry = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "entry_point": "f"}
    (written,) = read_prompt_file(write(tmp_path, entry, name="HumanEval.jsonl.gz")).prompts
    assert (written.content, written.id) == ("def f():\n", "HumanEval/0")


def test_conversations_without_a_question_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "ShareGPT.json"
    path.write_text(json.dumps(SHAREGPT))
    found = read_prompt_file(path)
    assert [written.id for written in found.prompts] == ["3", "6"]
    assert found.skipped == {"no turn": 2, "an answer before any question": 1, "an empty question": 2}
    words = "5 entries skipped: 1 with an answer before any question, 2 with an empty question, 2 with no turn"
    assert found.skipped_words == words
    path.write_text(json.dumps(SHAREGPT[:3]))
    with pytest.raises(ExperimentError, match="holds no prompt, 3 entries skipped: "):
        read_prompt_file(path)


def test_what_was_skipped_is_told_where_prompts_come_from(tmp_path: Path) -> None:
    letter_tokenizer(TEMPLATE).save_pretrained(tmp_path / "target")
    path = write(tmp_path, *SHAREGPT, {"turns": ["a", "b"]})
    prompts, source = prompts_for(tmp_path / "target", str(path), limit=9, max_tokens=50)
    assert len(prompts) == 3
    assert source.startswith("3 prompts of set.jsonl, first turns alone, ")
    assert "; 5 entries skipped: 1 with an answer before any question, 2 with an empty question" in source


def test_a_second_turn_follows_the_models_own_answer(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer(TEMPLATE)
    (first,) = load_prompts(write(tmp_path, {"turns": ["c", "d"], "question_id": 81}), tokenizer)
    second = next_turn(first, "e", tokenizer)
    assert tokenizer.decode(first.ids) == "a c "
    assert tokenizer.decode(second.ids) == "a c b e a d "
    assert (second.id, second.text, second.later) == ("81", "d", ())
    with pytest.raises(ExperimentError, match="has no further turn"):
        next_turn(second, "e", tokenizer)


def test_a_given_template_serves_a_tokenizer_that_has_none(tmp_path: Path) -> None:
    path, tokenizer, file = write(tmp_path, {"turns": ["c"]}), letter_tokenizer(), tmp_path / "vicuna.jinja"
    file.write_text(TEMPLATE)
    for given in (TEMPLATE, str(file)):
        (prompt,) = load_prompt_set(path, tokenizer, chat_template=given).prompts
        assert tokenizer.decode(prompt.ids) == "a c "
    assert tokenizer.chat_template is None, "the caller's own tokenizer stays as it is"
    with pytest.raises(ExperimentError, match="has one of its own"):
        load_prompts(path, letter_tokenizer("other {{ messages }}"), chat_template=TEMPLATE)
    with pytest.raises(ExperimentError, match="cannot be read"):
        load_prompts(path, tokenizer, chat_template=str(tmp_path / "none.jinja"))


def test_a_gzipped_file_with_a_mark_of_the_byte_order_is_read(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl.gz"
    path.write_bytes(gzip.compress('\ufeff{"question": "q\u2028r"}\n'.encode()))
    assert read_prompt_file(path).prompts[0].content == [{"role": "user", "content": "q\u2028r"}]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ExperimentError, match="cannot be read"):
        read_prompt_file(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(ExperimentError, match="cannot be read"):
        read_prompt_file(path)


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_file, "MOST_BYTES", 1 << 16)
    path = write(tmp_path, {"text": "x" * (1 << 20)}, name="set.jsonl.gz")
    assert path.stat().st_size < 1 << 16
    with pytest.raises(ExperimentError, match="at most 65536"):
        read_prompt_file(path)


def test_parquet_without_pyarrow_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with pytest.raises(ExperimentError, match=r"pip install 'eagle3lab\[parquet\]'"):
        read_prompt_file(tmp_path / "set.parquet")


def test_every_set_is_read_from_parquet_as_from_json(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    for i, (entry, _) in enumerate(SETS.values()):
        path = tmp_path / f"{i}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([entry, entry]), path, compression="none")
        by_row = read_prompt_file(path).prompts
        by_line = read_prompt_file(write(tmp_path, entry, entry)).prompts
        assert [(w.content, w.category, w.id, w.later) for w in by_row] == [
            (w.content, w.category, w.id, w.later) for w in by_line
        ]
    whole = path.read_bytes()
    no_text = whole.replace(b"\x01\x00\x00\x00q", b"\x01\x00\x00\x00\xe9")
    for damaged in (whole[:-20], no_text):
        path.write_bytes(damaged)
        with pytest.raises(ExperimentError, match="cannot be read"):
            read_prompt_file(path)


def test_parquet_rows_are_entries_whose_null_columns_are_absent(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path, rows = tmp_path / "set.parquet", [SETS["GSM8K"][0], {"question": "r", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [written.id for written in read_prompt_file(path).prompts] == ["1", "2"]
