"""`eagle3lab draft-vocab`: counts tokens, keeps the most frequent, and writes heads that choose among them alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eagle3core.checkpoint import convert_draft, fitting_format
from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.exchange import DraftVocabOptions
from lab.pairs.prompts import load_prompts
from lab.vocabulary.choose import Candidates, choose_vocabulary, read_candidates
from lab.vocabulary.counts import TokenCounts, count_answers, count_files, count_prompts


def run(options: DraftVocabOptions) -> int:
    """Counts, chooses and writes; says of each size how much of the text it covers and what its head takes.

    Raises:
        ExperimentError: nothing to count, or a size that the draft or the text cannot give.
        CheckpointError: a pair that cannot be read, or a format that cannot hold the head.
    """
    places = _places(options)
    candidates = read_candidates(options.target, options.draft, options.norm_output)
    counts = _counted(options, candidates)
    chosen = choose_vocabulary(counts, options.size, candidates.own, candidates.always)
    print(f"{counts.n_tokens} tokens of {counts.source}: {counts.n_distinct} distinct of {candidates.vocab}")
    if counts.otherwise is not None:
        print(f"what they leave equal or have not seen is ranked by {counts.otherwise.source}")
    print("\n".join(_always(candidates)))
    if options.counts is not None:
        _write_counts(counts, options.counts)
    source, target, norm_output = options.draft, options.target, options.norm_output
    to = options.to if options.to != "auto" else fitting_format(source, target, norm_output=norm_output)
    for ids, place in zip(chosen, places, strict=True):
        written = convert_draft(
            source, place, to, target=target, drop=options.drop, norm_output=norm_output, kept=ids
        )  # fmt: skip
        print(*written.said, _told(ids, counts, candidates), f"wrote {place} as {to}, read back and equal", sep="\n")
    return EXIT_PASSED


def _always(candidates: Candidates) -> list[str]:
    """What is kept whatever its counts, and what of it the head does not choose among today, a line each."""
    own = set(candidates.own)
    has = [f"{text} ({token})" for token, text in candidates.always.items() if token in own]
    lacks = [f"{text} ({token})" for token, text in candidates.always.items() if token not in own]
    never = [f"never drafted, before or after: {', '.join(lacks)}"] if lacks else []
    return [f"always kept: {', '.join(has) or 'none'}", *never]


def _told(ids: Sequence[int], counts: TokenCounts, candidates: Candidates) -> str:
    """What is kept, in words."""
    n_own, megabytes = len(candidates.own), len(ids) * candidates.width * 2 / 1e6
    return (
        f"{len(ids)} of {n_own} tokens cover {counts.coverage(ids):.2%} of the text; "
        f"head {megabytes:.1f} MB in 16 bits, {len(ids) / n_own:.0%} of before"
    )


def _places(options: DraftVocabOptions) -> list[Path]:
    """A directory a size: the one that is named, or one in it for each of several."""
    if len(options.size) == 1:
        return [options.out]
    if options.out.exists() and not options.out.is_dir():
        raise ExperimentError(f"{options.out} is a file", "a directory for those of each size", "name another --out")
    return [options.out / str(size) for size in options.size]


def _counted(options: DraftVocabOptions, candidates: Candidates) -> TokenCounts:
    """Counts of what was named: of prompts, or of their answers, where they are told of first; text ranks the rest."""
    chats, vocab = candidates.chats, candidates.vocab
    if chats is None:
        raise ExperimentError(
            f"{Path(options.target).name} has no tokenizer", "a target with one: text is counted in its tokens",
            "copy the tokenizer's files beside the weights",
        )  # fmt: skip
    text = count_files(options.text, chats, vocab) if options.text else None
    if not options.prompts:
        assert text is not None, "the options have text or prompts"
        return text
    template = options.chat_template
    sets = [load_prompts(path, chats.tokenizer, chat_template=template) for path in options.prompts]
    prompts, names = [prompt for each in sets for prompt in each], [Path(path).name for path in options.prompts]
    if options.answers:
        from lab.parity.recording import PairUnderTest

        pair = PairUnderTest(Path(options.target), options.draft, options.dtype, options.device)
        counts = count_answers(pair, prompts, options.answers, vocab)
    else:
        counts = count_prompts(prompts, vocab, f"{len(prompts)} prompts of {', '.join(names)}")
    return replace(counts, otherwise=text)


def _write_counts(counts: TokenCounts, path: Path) -> None:
    """The list of frequencies: ids with their counts, the most frequent first."""
    ids = counts.by_frequency(range(len(counts.counts)))
    listed = {"source": counts.source, "n_tokens": counts.n_tokens, "ids": ids, "counts": counts.counts[ids].tolist()}
    path.write_text(json.dumps(listed) + "\n", encoding="utf-8")
    print(f"wrote {path}: {len(ids)} tokens by frequency")
