"""Chats to token ids, by a template that came with a checkpoint and is not trusted.

A chat template is a program: it may loop for hours and ask for gigabytes. It is therefore written out in a process of
its own, whose time and memory the operating system limits. `writer` is the side that asks, `template_process` the
program that writes; that one imports jinja2 and nothing of this house. `tokenizer_files` looks at a tokenizer's files
before their reader does. The way back, from an answer's tokens to what the user is told, is in `answers`; `harmony`
reads the channels of gpt-oss.
"""

from eagle3core.chat.answers import AnswerParts, ChatAnswers
from eagle3core.chat.harmony import ChatAnswer, Part, read_harmony
from eagle3core.chat.tokenizer_files import check_tokenizer_files
from eagle3core.chat.writer import ChatWriter, Message

__all__ = [
    "AnswerParts",
    "ChatAnswer",
    "ChatAnswers",
    "ChatWriter",
    "Message",
    "Part",
    "check_tokenizer_files",
    "read_harmony",
]
