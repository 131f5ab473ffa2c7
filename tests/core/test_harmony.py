"""Answers in channels are taken apart as they come, and what breaks the format is plain text: nothing is raised."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import letter_tokenizer

from eagle3core.chat import ChatAnswer, ChatAnswers, read_harmony
from eagle3core.chat.harmony import MARKS, HarmonyReader, Part, collected

pytestmark = pytest.mark.reference

FINAL = "<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant"
ANSWERS = {
    f"{FINAL}It is 4.<|return|>": ChatAnswer("It is 4."),
    f"{THOUGHT}{FINAL}It is 4.<|return|>": ChatAnswer("It is 4.", "Add them."),
    f"{THOUGHT}{FINAL}It is": ChatAnswer("It is", "Add them."),
    "<|channel|>analysis<|message|>Add th": ChatAnswer("", "Add th"),
    f"{THOUGHT}<|channel|>fin": ChatAnswer("", "Add them."),
    f"{THOUGHT}{FINAL}a<|end|><|return|>": ChatAnswer("a", "Add them."),
    f"<|channel|>analysis<|message|>Add them.<|start|>assistant{FINAL}4": ChatAnswer("4", "Add them."),
    "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary to=functions.sum "
    '<|constrain|>json<|message|>{"a": 2}<|call|>': ChatAnswer("Let me look.", "", (("functions.sum", '{"a": 2}'),)),
    " to=functions.sum<|channel|>commentary json<|message|>{}<|call|>": ChatAnswer("", "", (("functions.sum", "{}"),)),
    "": ChatAnswer(""),
}
BROKEN = {
    "It is 4.": ("It is 4.", "'It' in a header"),
    "assist": ("assist", "no message"),
    "<|channel|>––commentary<|message|>It is 4.<|return|>": ("––commentaryIt is 4.", "'––commentary' in a header"),
    "assistantassistant<|channel|>final<|message|>4": ("assistantassistantfinal4", "'assistantassistant' in a header"),
    "<|channel|><|message|>4": ("4", "a channel without a name"),
    f"{FINAL}4<|message|>5": ("45", "<|message|> in a message"),
    f"{FINAL}4<|end|>and 5": ("4and 5", "text between messages"),
    f"{FINAL}4<|return|>and 5": ("4and 5", "text behind the last message"),
    "<|start|>assistant": ("assistant", "<|start|> in a header"),
    f"<|channel|>final {'x' * 400}": (f"final {'x' * 400}", "a header of more than 300 letters"),
}
pieces = st.one_of(
    st.sampled_from([*MARKS, "assistant", "analysis", "final", "commentary", " to=functions.f", " json", "text ", " "]),
    st.text(max_size=8),
)


@pytest.mark.parametrize(("text", "answer"), ANSWERS.items())
def test_channels_are_told_apart(text: str, answer: ChatAnswer) -> None:
    assert read_harmony(text) == answer


@pytest.mark.parametrize(("text", "expected"), BROKEN.items())
def test_what_breaks_the_format_is_plain_text_with_its_reason(text: str, expected: tuple[str, str]) -> None:
    answer = read_harmony(text)
    assert (answer.content, answer.fault) == expected


@given(st.lists(pieces, max_size=14), st.data())
def test_any_division_of_any_text_gives_the_same_answer_and_none_raises(texts: list[str], data: st.DataObject) -> None:
    text = "".join(texts)
    whole, reader, parts = read_harmony(text), HarmonyReader(), list[Part]()
    for piece in re.split(f"({'|'.join(map(re.escape, MARKS))})", text):
        if piece in MARKS:
            parts += reader.mark(piece)
            continue
        cuts = sorted(data.draw(st.sets(st.integers(0, len(piece)), max_size=3)))
        for start, end in zip([0, *cuts], [*cuts, len(piece)], strict=True):
            parts += reader.text(piece[start:end])
    parts += reader.end()
    assert collected(parts, "") == replace(whole, fault="")
    assert bool(reader.fault) == bool(whole.fault)


@given(st.lists(pieces, max_size=14))
def test_an_answer_holds_no_letter_that_was_not_written_and_plain_text_is_whole(texts: list[str]) -> None:
    text = "".join(texts)
    answer = read_harmony(text)
    told = answer.content + answer.reasoning + "".join(arguments for _, arguments in answer.calls)
    plain = re.sub("|".join(map(re.escape, MARKS)), "", text)
    assert Counter(told) <= Counter(plain)
    if plain == text and text.strip():
        assert (answer.content, bool(answer.fault)) == (text, True)


def harmony_answers(template: str = "<|start|>assistant<|channel|><|message|>") -> ChatAnswers:
    tokenizer = letter_tokenizer(template, "abcdefghilmnorsty .4")
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return ChatAnswers(tokenizer)


def ids_of(answers: ChatAnswers, text: str) -> list[int]:
    return list(answers.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_tokens_are_read_by_their_ids_one_at_a_time_as_all_at_once() -> None:
    answers = harmony_answers()
    ids = ids_of(
        answers, "<|channel|>analysis<|message|>so it is<|end|><|start|>assistant<|channel|>final<|message|>4."
    )
    whole = answers.read(ids, "")
    assert whole == ChatAnswer("4.", "so it is")
    reader, parts = answers.begin(), list[Part]()
    for token in ids:
        parts += reader.more([token])
    assert collected([*parts, *reader.rest()], reader.fault) == whole
    assert answers.n_plain == 0


def test_a_stop_word_is_not_shown_and_ends_the_text_before_it() -> None:
    answers = harmony_answers()
    ids = ids_of(answers, "<|channel|>final<|message|>it is so")
    reader = answers.begin(["is s"])
    parts = [part for token in ids for part in reader.more([token])]
    assert "".join(part.text for part in [*parts, *reader.rest()]) == "it "


def test_a_broken_answer_is_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = harmony_answers()
    with caplog.at_level(logging.WARNING, "eagle3core"):
        assert answers.read(ids_of(answers, "it is 4"), "it is 4").content == "it is 4"
        reader = answers.begin()
        assert [part.text for token in ids_of(answers, "4 so") for part in reader.more([token])]
        reader.rest()
    assert answers.n_plain == 2
    assert [record.message for record in caplog.records] == [
        f"an answer breaks the chat format ({word!r} in a header): it is plain text from there on"
        for word in ("it", "4")
    ]


def test_a_tokenizer_without_channels_answers_in_plain_text() -> None:
    answers = harmony_answers("{{ messages }}")
    assert not answers.has_channels
    ids = ids_of(answers, "<|channel|>final<|message|>4")
    assert answers.read(ids, "final4") == ChatAnswer("final4")
    assert not ChatAnswers(harmony_answers().tokenizer, parses=False).has_channels
