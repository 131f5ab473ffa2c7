"""A byte-level BPE tokenizer of the pair's own, and the token streams it makes of documents.

Any text is encodable (every byte has an entry). The one special token ends every document and serves as both
beginning and end of sequence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lab.training.corpus import Document

END = "<|endoftext|>"
END_ID = 0

Tokens = npt.NDArray[np.uint16]

# The corpus is source code, so a conversation is written as comments and the answer is what follows the last of them.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


def train_tokenizer(documents: Sequence[Document], vocab: int) -> Any:
    """A `tokenizers.Tokenizer` of exactly `vocab` entries; the same documents always give the same one.

    Args:
        documents: training documents only.
        vocab: entries, the end token and the 256 bytes included; at most 65536.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def encode(tokenizer: Any, documents: Sequence[Document]) -> Tokens:
    """One stream of ids: the end token, then each document followed by the end token."""
    pieces: list[npt.ArrayLike] = [[END_ID]]
    for encoding in tokenizer.encode_batch_fast([document.text for document in documents]):
        pieces.append([*encoding.ids, END_ID])
    return np.concatenate([np.asarray(piece, dtype=np.uint16) for piece in pieces])


def save_tokenizer(tokenizer: Any, directory: Path, max_length: int) -> None:
    """The files from which `transformers.AutoTokenizer` builds a fast tokenizer with a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def load_tokenizer(directory: Path) -> Any:
    """The `tokenizers.Tokenizer` that `save_tokenizer` wrote."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
