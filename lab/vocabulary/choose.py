"""Which tokens a smaller draft vocabulary keeps: the most frequent, and always those that end or frame a turn.

A draft that cannot propose an end token loses a draft at every end; a chat's marks are written in every turn, and a
text without chats holds none of them. Source: FR-Spec (arXiv 2502.14856), which keeps end tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3core.chat import ChatWriter
from eagle3core.checkpoint import load_draft, target_of
from eagle3core.errors import ConfigError
from eagle3core.pipeline import load_tokenizer
from lab.errors import ExperimentError
from lab.pairs.random_ids import has_tokenizer
from lab.vocabulary.counts import TokenCounts

_CHAT = (("user", "question"), ("assistant", "answer"), ("user", "question"))


@dataclass(frozen=True)
class Candidates:
    """What a head chooses among now.

    Attributes:
        own: target ids. always: those that are kept whatever their counts, each with its text.
        vocab: the target's vocabulary. width: of the states that the head reads.
        chats: the target's tokenizer and template; None for a target without a tokenizer.
    """

    own: tuple[int, ...]
    always: dict[int, str]
    vocab: int
    width: int
    chats: ChatWriter | None


def read_candidates(target: str | Path, draft: str | Path, norm_output: str | None = None) -> Candidates:
    """What a head chooses among, and what it has to keep.

    Raises:
        CheckpointError: the pair or the tokenizer cannot be read.
    """
    shapes = target_of(target)
    head = load_draft(draft, shapes, norm_output=norm_output)
    mapping, n_own = head.draft_to_target, head.geometry.draft_vocab_size
    chats = ChatWriter(load_tokenizer(target)) if has_tokenizer(Path(target)) else None
    ends = shapes.eos_token_ids
    always = always_kept(chats, ends) if chats is not None else dict.fromkeys(sorted(ends), "")
    own = tuple(range(n_own)) if mapping is None else tuple(mapping.tolist())
    return Candidates(own, always, shapes.vocab_size, head.geometry.block.hidden_size, chats)


def choose_vocabulary(
    counts: TokenCounts, sizes: Sequence[int], own: Collection[int], always: Collection[int]
) -> list[list[int]]:
    """For each size the ids to keep, ascending.

    Args:
        counts: of the target's tokens. sizes: wanted.
        own: ids that the draft chooses among now. always: ids kept whatever their counts; those the draft lacks are
            left out.

    Raises:
        ExperimentError: a size larger than the draft's own, smaller than what is always kept, or larger than what was
            counted can fill.
    """
    kept_always = sorted(set(always) & set(own))
    ranked = [token for token in counts.by_frequency(own) if token not in set(kept_always)]
    for size in sizes:
        _check_size(size, len(own), kept_always, len(ranked), counts)
    return [sorted(kept_always + ranked[: size - len(kept_always)]) for size in sizes]


def _check_size(size: int, n_own: int, always: Sequence[int], n_ranked: int, counts: TokenCounts) -> None:
    if size > n_own:
        raise ExperimentError(
            f"size is {size}, the draft chooses among {n_own} tokens", f"at most {n_own}", "lower the size"
        )
    if size < max(2, len(always)):
        raise ExperimentError(
            f"size is {size}, and {len(always)} tokens are always kept: {', '.join(map(str, always))}",
            f"at least {max(2, len(always))}", "raise the size",
        )  # fmt: skip
    most = n_ranked + len(always)
    if size > most:
        raise ExperimentError(
            f"size is {size}, and only {most} of the draft's tokens were seen or are always kept: "
            f"{counts.n_tokens} tokens of {counts.source} hold {counts.n_distinct} distinct ones",
            f"at most {most} with this text", "give more text, or lower the size",
        )  # fmt: skip


def always_kept(chats: ChatWriter, ends: Collection[int]) -> dict[int, str]:
    """Ids that are kept whatever their counts, each with its text: ends, and the special tokens of a chat's turns.

    Args:
        chats: the target's tokenizer with its chat template, if it has one.
        ends: end tokens of the target's own configuration.
    """
    tokenizer = chats.tokenizer
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    ids = {*ends, *(set(_chat_ids(chats)) & special)}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return {token: str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(ids)}


def _chat_ids(chats: ChatWriter) -> list[int]:
    """A short chat as the template writes it; none where there is no template, or it takes no such chat."""
    if not chats.has_template:
        return []
    try:
        return chats.ids([{"role": role, "content": content} for role, content in _CHAT])
    except ConfigError:  # a template of other roles: its own tokens then have to occur in the text
        return []
