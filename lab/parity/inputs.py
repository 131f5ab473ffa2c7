"""What a parity run is given: a pair, and prompts as token ids.

Parity does not care what a prompt says, so a target without a tokenizer gets seeded random ids; the report says so.
"""

from __future__ import annotations

from pathlib import Path

from lab.errors import ExperimentError
from lab.pairs.named import NAMES, named_pair
from lab.pairs.on_disk import pair_on_disk
from lab.pairs.prompts import load_prompts, uneven_prompts
from lab.pairs.random_ids import PromptIds, has_tokenizer, random_prompts, range_of_lengths

# By turns: three cache blocks and a second chunk of 128; a few tokens; more than the engine's own chunk of 512; and two
# for slots that are filled again, of which one crosses a block.
STAGE_LENGTHS = (130, 5, 577, 23, 70)


def chosen_pair(target: str, draft: str) -> tuple[Path, Path]:
    """The named directories; or a pair by its name, given as `target` alone; with both empty the shipped pair.

    Raises:
        ExperimentError: only one was named, and it is no pair's name; or a folder is no checkpoint's.
    """
    if bool(target) != bool(draft) and target not in NAMES:
        given, absent = ("target", "draft") if target else ("draft", "target")
        raise ExperimentError(
            f"{given} was given without {absent}",
            f"both, neither, or the name of a pair as target: {', '.join(NAMES)}",
            f"name {absent} as well",
        )
    pair = pair_on_disk(target, draft) if draft else named_pair(target or "shipped")
    return pair.target, pair.draft


def prompt_ids(target: Path, prompts: str, *, n_prompts: int, max_tokens: int, chat_template: str = "") -> PromptIds:
    """The first `n_prompts` prompts, each cut to its first `max_tokens` tokens.

    Args:
        target: directory whose tokenizer is used.
        prompts: a file as `lab.pairs.prompts` reads it; empty takes the held-out prompts of the shipped pair.
        n_prompts, max_tokens: at most so many, and so long.
        chat_template: as for `lab.pairs.prompts.load_prompt_set`.

    Raises:
        ExperimentError: a count below its least value, or a prompt file for a target without a tokenizer.
    """
    _check_counts(n_prompts, max_tokens)
    if not has_tokenizer(target):
        return random_prompts(target, n_prompts, max_tokens)
    from eagle3core.pipeline import load_tokenizer

    path = Path(prompts) if prompts else _shipped_prompts()
    loaded = load_prompts(path, load_tokenizer(target), limit=n_prompts, chat_template=chat_template)
    ids = [list(prompt.ids[:max_tokens]) for prompt in loaded]
    return PromptIds(ids, f"{len(ids)} prompts of {path.name}, {range_of_lengths(ids)} tokens")


def stage_prompt_ids(
    target: Path, prompts: str, *, n_prompts: int, max_tokens: int, chat_template: str = ""
) -> PromptIds:
    """As `prompt_ids`, but of `STAGE_LENGTHS` by turns: each begins with another prompt and goes on with the next ones.

    A bug that needs a batch of unequal lengths, several blocks or several chunks then has them.

    Raises:
        ExperimentError: as `prompt_ids`.
    """
    _check_counts(n_prompts, max_tokens)
    lengths = [min(length, max_tokens) for length in STAGE_LENGTHS]
    ids = uneven_prompts(target, n_prompts, lengths=lengths, file=prompts, chat_template=chat_template)
    has_text = has_tokenizer(target)
    name = Path(prompts).name if prompts else "the shipped pair's prompts"
    source = f"tokens of {name}" if has_text else "random ids (the target has no tokenizer)"
    return PromptIds(ids, f"{n_prompts} prompts of {source}, {range_of_lengths(ids)} tokens")


def _check_counts(n_prompts: int, max_tokens: int) -> None:
    if n_prompts < 1 or max_tokens < 2:
        raise ExperimentError(
            f"n_prompts is {n_prompts} and max_prompt_tokens {max_tokens}", "at least 1 and 2", "raise them"
        )


def _shipped_prompts() -> Path:
    from lab import pairs

    path = pairs.shipped_pair().prompts
    if path is None:
        raise ExperimentError("the shipped pair has no prompts", "a prompt file", "name one with prompts=FILE.jsonl")
    return Path(path)
