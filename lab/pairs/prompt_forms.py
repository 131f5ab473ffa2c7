"""What one entry of a prompt set is: its keys say, as the sets are published. See `prompt_file` for the list.

An entry of recorded conversations that holds no question is skipped and counted: published sets have thousands of
them. Anything else that cannot be read is a mistake of the file, and refused with its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lab.errors import ExperimentError
from lab.rows.values import shortened

NO_CATEGORY = "uncategorised"
# Far beyond any set's; what is longer is a mistake.
MOST_ID_LETTERS = 200
IDS = ("id", "question_id", "task_id", "unique_id", "prompt_id", "conversation_id", "conversation_hash")
CATEGORIES = ("category", "subject", "dataset")
Message = dict[str, str]


@dataclass(frozen=True)
class Written:
    """One prompt as its file has it.

    Attributes:
        place: file and line, for refusals.
        content: a text, or the messages of a chat up to the last of the user.
        category: for reports by category. id: the file's own, else the line number.
        later: further user turns, each to be asked after the model's own answer to those before.
    """

    place: str
    content: str | list[Message]
    category: str
    id: str
    later: tuple[str, ...] = ()


class Skipped(Exception):
    """An entry of recorded conversations that holds no question, and why."""


def read_entry(entry: Any, place: str) -> Written:
    """The prompt of an entry.

    Raises:
        Skipped: a recorded conversation without a question.
        ExperimentError: no entry of a known form.
    """
    if not isinstance(entry, dict):
        raise refused_prompt(place, f"holds a {type(entry).__name__}", "write an object")
    forms = [form for form in FORMS if form in entry]
    forms = [form for form in forms if not any(form in _BESIDE.get(other, ()) for other in forms)]
    if len(forms) != 1:
        others = ", ".join(shortened(key) for key in islice(entry, 8))
        found = " and ".join(forms) or f"none of them but {others or 'nothing'}"
        raise refused_prompt(place, f"has {found}", "keep exactly one of these keys")
    (form,) = forms
    content, later = FORMS[form](entry, place, form)
    category = next((entry[key] for key in CATEGORIES if entry.get(key)), NO_CATEGORY)
    own_id = next((entry[key] for key in IDS if entry.get(key) is not None), place.split()[-1])
    if not isinstance(own_id, (str, int)) or len(str(own_id)) > MOST_ID_LETTERS:
        remedy = f"give it a number, or a text of {MOST_ID_LETTERS} letters"
        raise refused_prompt(place, f"has the id {shortened(own_id)}", remedy)
    return Written(place, content, _text(category, place, "category"), str(own_id), later)


Read = tuple[str | list[Message], tuple[str, ...]]


def _plain(entry: dict[str, Any], place: str, form: str) -> Read:
    """A text as it is; MBPP's `text` or `prompt` beside `code` is a task, so it is asked."""
    text = _text(entry[form], place, form)
    return (_asked(text) if "code" in entry else text), ()


def _question(entry: dict[str, Any], place: str, form: str) -> Read:
    return _asked(_text(entry[form], place, form)), ()


def _instruction(entry: dict[str, Any], place: str, form: str) -> Read:
    """Alpaca's instruction, with its input below it where it has one."""
    text, more = _text(entry[form], place, form), entry.get("input")
    return _asked(f"{text}\n\n{more}" if isinstance(more, str) and more.strip() else text), ()


def _article(entry: dict[str, Any], place: str, form: str) -> Read:
    return _asked(f"Summarize: {_text(entry[form], place, form)}"), ()


def _turns(entry: dict[str, Any], place: str, form: str) -> Read:
    content = entry[form]
    if not isinstance(content, list) or not content:
        raise refused_prompt(place, f"has turns {shortened(content)}", "write a list of texts")
    first, *later = (_text(turn, place, "first turn" if i == 0 else "turn") for i, turn in enumerate(content))
    return _asked(first), tuple(later)


def _messages(entry: dict[str, Any], place: str, form: str) -> Read:
    """Messages up to the last of the user."""
    content = entry[form]
    if not isinstance(content, list) or not content:
        raise refused_prompt(place, f"has messages {shortened(content)}", "write a list of role and content")
    for message in content:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refused_prompt(
                place, f"has the message {shortened(message)}", "give every message a role and a content"
            )
        _text(message.get("content"), place, f"content of the {message['role']}")
    asked = [i for i, message in enumerate(content) if message["role"] == "user"]
    if not asked:
        raise refused_prompt(place, "has no message of role 'user'", "add the user's message")
    return [{"role": m["role"], "content": m["content"]} for m in content[: asked[-1] + 1]], ()


def _recorded(entry: dict[str, Any], place: str, form: str) -> Read:
    """The first question of a recorded conversation; its later ones were asked after another model's answers.

    SpecForge's, WildChat's and LMSYS's turns have a role and a content; ShareGPT's say whom they are from.
    """
    turns = [_turn(turn) for turn in entry[form]] if isinstance(entry[form], list) else []
    opening = [text for role, text in turns[:1] if role == "system"]
    turns = turns[len(opening) :]
    if not turns:
        raise Skipped("no turn")
    role, text = turns[0]
    if role != "user":
        raise Skipped(f"{'an answer' if role == 'assistant' else 'something else'} before any question")
    if not text.strip():
        raise Skipped("an empty question")
    system = [{"role": "system", "content": text} for text in opening if text.strip()]
    return [*system, *_asked(text)], ()


def _turn(turn: Any) -> tuple[str, str]:
    """(role, text) of a recorded turn; of what is none, empty ones."""
    given = turn if isinstance(turn, dict) else {}
    role, text = given.get("role", given.get("from")), given.get("content", given.get("value"))
    known = {"human": "user", "user": "user", "system": "system"}
    answers = dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard"), "assistant")
    return (known | answers).get(role if isinstance(role, str) else "", ""), text if isinstance(text, str) else ""


def _asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _text(value: Any, place: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise refused_prompt(place, f"has {what} {shortened(value)}", "write a non-empty text")
    return value


def refused_prompt(place: str, what: str, remedy: str) -> ExperimentError:
    """The refusal of a line or a file of prompts."""
    return ExperimentError(f"{place} {what}", f"objects with one of {', '.join(FORMS)}", remedy)


FORMS: dict[str, Callable[[dict[str, Any], str, str], Read]] = {
    "text": _plain, "prompt": _plain, "messages": _messages, "turns": _turns, "conversations": _recorded,
    "conversation": _recorded, "question": _question, "problem": _question, "instruction": _instruction,
    "article": _article,
}  # fmt: skip
# Keys that a published set has beside its own: UltraChat's prompt is its first message, Alpaca's text holds the answer.
_BESIDE = {"messages": ("prompt",), "instruction": ("text", "prompt"), "turns": ("prompt",)}
