"""Prompt files of every published shape are read, and a bad line is named by its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lab.errors import ExperimentError
from lab.pairs.prompt_file import MOST_BYTES, MOST_LETTERS, NO_CATEGORY
from lab.pairs.prompts import load_prompts, prompts_for, prompts_from_ids

pytestmark = pytest.mark.reference

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A real tokenizer of single bytes, so that token ids can be read."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    fast.chat_template = TEMPLATE
    return fast


def write(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def read_back(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(list(ids))).replace("Ġ", " ")


@pytest.mark.parametrize(
    ("entry", "seen"),
    [
        ({"text": "def main"}, "def main"),
        ({"prompt": "def main"}, "def main"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "<user>hi<assistant>"),
        (
            {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]},
            "<system>be<user>hi<assistant>",
        ),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
            "<user>hi<assistant>",
        ),
        ({"question_id": 81, "category": "writing", "turns": ["first", "second"]}, "<user>first<assistant>"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "ask"},
                    {"from": "gpt", "value": "answer"},
                ]
            },
            "<user>ask<assistant>",
        ),
    ],
)
def test_every_shape_becomes_the_right_tokens(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, entry: dict[str, Any], seen: str
) -> None:
    (prompt,) = load_prompts(write(tmp_path, entry), tokenizer)
    assert read_back(tokenizer, prompt.ids) == seen


def test_categories_and_ids_are_kept_or_filled_in(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["a"]},
        "",
        {"text": "b"},
        {"id": "x", "text": "c"},
    )
    prompts = load_prompts(path, tokenizer)
    assert [(p.id, p.category, p.text) for p in prompts] == [
        ("81", "writing", "a"),
        ("3", NO_CATEGORY, "b"),
        ("x", NO_CATEGORY, "c"),
    ]


def test_a_json_array_is_read_as_well(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    entries = [{"id": "s1", "conversations": [{"from": "human", "value": "ask"}]}, {"text": "t"}]
    path = write(tmp_path, json.dumps(entries, indent=1))
    assert [p.id for p in load_prompts(path, tokenizer)] == ["s1", "2"]


def test_the_limit_stops_reading_before_later_lines(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, {"text": "a"}, {"text": "b"}, "no json")
    assert [p.text for p in load_prompts(path, tokenizer, limit=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("{", "line 2 is no JSON"),
        ("3", "line 2 holds a int"),
        ({"query": "why"}, "line 2 has none of them but 'query'"),
        ({"text": "a", "prompt": "b"}, "line 2 has text and prompt"),
        ({"text": " "}, "line 2 has text ' '"),
        ({"text": None}, "line 2 has text None"),
        ({"messages": []}, "line 2 has messages []"),
        ({"messages": [{"content": "x"}]}, "line 2 has the message"),
        ({"messages": [{"role": "user", "content": ""}]}, "line 2 has content of the user ''"),
        ({"messages": [{"role": "system", "content": "x"}]}, "line 2 has no message of role 'user'"),
        ({"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]}, "unknown role tool"),
        ({"turns": []}, "line 2 has turns []"),
        ({"turns": [4]}, "line 2 has first turn 4"),
        ({"turns": ["a", ""]}, "line 2 has turn ''"),
        ({"problem": 3}, "line 2 has problem 3"),
        ({"instruction": "a", "question": "b"}, "line 2 has question and instruction"),
        ({"text": "a", "category": 3}, "line 2 has category 3"),
        ({"text": "a", "id": {"deep": 1}}, "line 2 has the id {'deep': 1}"),
        ({"text": "a", "id": "x" * 300}, "line 2 has the id 'xxx"),
        ('{"text": "half \\ud800"}', "line 2 is no JSON: half a letter (a lone surrogate)"),
        ("[" * 100_000, "line 2 is no JSON: nested more than"),
        ({"turns": [[["x" * 9000] * 9] * 9]}, "line 2 has first turn [["),
        ('{"text": "' + "x" * MOST_LETTERS + '"}', "letters, at most 8388608 are read"),
    ],
)
def test_a_bad_line_is_named_by_its_number(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, line: Any, shown: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_prompts(write(tmp_path, {"text": "good"}, line), tokenizer)
    assert shown in str(caught.value)
    assert len(str(caught.value)) < 500, "what a stranger wrote does not fill the terminal"


def test_only_a_newline_ends_a_line_and_a_mark_of_the_byte_order_is_no_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}\n'.encode())
    assert [prompt.text for prompt in load_prompts(path, tokenizer)] == ["a\u2028b\u0085c", "d"]


def test_a_file_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "prompts.jsonl"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a hole: it takes no room
    with pytest.raises(ExperimentError, match="has 268435457 bytes"):
        load_prompts(path, tokenizer)


def test_a_chat_without_a_template_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    path = write(tmp_path, {"turns": ["hi"]})
    with pytest.raises(ExperimentError, match="line 1 is a chat, and the tokenizer has no chat template"):
        load_prompts(path, plain)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ExperimentError, match="cannot be read"):
        load_prompts(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(ExperimentError, match="holds no prompt"):
        load_prompts(write(tmp_path, ""), tokenizer)


def test_token_ids_are_prompts_unless_empty() -> None:
    assert [p.ids for p in prompts_from_ids([[1, 2], [3]])] == [(1, 2), (3,)]
    with pytest.raises(ExperimentError, match="prompt 1 is empty"):
        prompts_from_ids([[1], []])


def test_a_notebook_gets_the_last_tokens_of_long_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path / "target")
    file = write(tmp_path, {"text": "def main"}, {"turns": ["hi"], "category": "chat"}, {"text": "third"})
    prompts, source = prompts_for(tmp_path / "target", str(file), limit=2, max_tokens=12)
    assert [read_back(tokenizer, prompt.ids) for prompt in prompts] == ["def main", "i<assistant>"]
    assert [prompt.category for prompt in prompts] == [NO_CATEGORY, "chat"]
    assert source == "2 prompts of prompts.jsonl, 8 to 12 tokens, 1 cut to their last 12"
