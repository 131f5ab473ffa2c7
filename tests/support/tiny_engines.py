"""Engines over tiny random pairs, for tests that decode.

A draft vocabulary of a few tokens makes a random draft right often enough for every accepted length to occur.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from random_pairs import write_random_pair
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3core import Engine, EngineConfig, GenerationConfig, Response, SpeculativeConfig
from eagle3core.checkpoint import load_draft, load_target
from eagle3core.kernels.slots.slot_state import RUNNING
from eagle3core.lookup import LOOKUPS
from eagle3core.step.admission import SlotRequest
from eagle3core.step.outcome import RowOutcome
from eagle3core.step.replay import EagerReplayer
from eagle3core.step.run import DeviceRunner
from eagle3core.step.sizes import DeviceSizes
from eagle3core.step.tree import FlatTree, GrownTree
from eagle3core.trace import Trace
from eagle3core.weights import pack_checkpoints

Pair = tuple[Path, Path]
N_VOCAB = 6
LETTERS = "abcde "
DYNAMIC_TREE = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 3, "max_decoding_tokens": 10}
FIXED_TREE = {"choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}


def write_tiny_pair(directory: Path, **changes: Any) -> Pair:
    """A two-layer pair over six tokens whose end token (-1) never occurs unless `eos` says otherwise."""
    geometry: dict[str, Any] = {
        "n_layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "ffn": 48,
        "vocab": N_VOCAB,
        "draft_vocab": None,
        "taps": (0, 1, 2),
        "convention": "input",
        "eos": [],
    }
    return write_random_pair(directory, **{**geometry, **changes})


def engine_config(pair: Pair, k: int | None, **changes: Any) -> EngineConfig:
    """Double precision on the CPU with small blocks and chunks; `k` drafts a step, None for plain decoding."""
    settings: dict[str, Any] = {
        "session_len": 64,
        "max_batch_size": 3,
        "block_size": 4,
        "prefill_chunk": 8,
        "dtype": "float64",
        "device": "cpu",
    }
    speculative = None if k is None else SpeculativeConfig(model=str(pair[1]), num_speculative_tokens=k)
    return EngineConfig(**{**settings, "speculative_config": speculative, **changes})


def tiny_engine(
    pair: Pair, k: int | None, *, trace: Trace | None = None, tokenizer: Any = None, **changes: Any
) -> Engine:
    """An engine over a pair on disk."""
    return Engine.from_pretrained(pair[0], engine_config(pair, k, **changes), trace=trace, tokenizer=tokenizer)


def drafting_engine(pair: Pair, fields: Mapping[str, Any], **changes: Any) -> Engine:
    """An engine that drafts as `fields` of its speculative config say: with the pair's draft, unless they name another
    model or a method without one."""
    own = {} if fields.get("method") in LOOKUPS else {"model": str(pair[1])}
    spec = SpeculativeConfig(**{**own, **fields})
    return Engine.from_pretrained(pair[0], engine_config(pair, None, speculative_config=spec, **changes))


@lru_cache(maxsize=4)  # tests of a file decode plainly again and again, mostly over one pair
def plain_engine(pair: Pair, n_slots: int = 3) -> Engine:
    """The engine without drafts over a pair, kept for whoever compares with it; nobody may change it."""
    return tiny_engine(pair, None, max_batch_size=n_slots)


def plain_tokens(pair: Pair, prompts: list[list[int]], n_new: int) -> list[list[int]]:
    """What greedy decoding without drafts gives after each prompt."""
    return [list(tokens) for tokens in _decoded_plainly(pair, tuple(map(tuple, prompts)), n_new)]


@lru_cache(maxsize=64)
def _decoded_plainly(pair: Pair, prompts: tuple[tuple[int, ...], ...], n_new: int) -> list[list[int]]:
    return tokens_of(plain_engine(pair).generate([list(prompt) for prompt in prompts], new_tokens(n_new)))


def random_prompts(lengths: list[int], *, n_vocab: int = N_VOCAB, seed: int = 0) -> list[list[int]]:
    """One prompt of random tokens for each length."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(n_vocab, (length,), generator=random).tolist() for length in lengths]


def new_tokens(n: int, **changes: Any) -> GenerationConfig:
    """Settings that stop after `n` tokens."""
    return GenerationConfig(max_new_tokens=n, **changes)


def drawn_alone(
    pair: Pair, prompts: list[list[int]], n_new: int, temperature: float, seed: int
) -> tuple[list[GenerationConfig], list[list[int]]]:
    """Limits of each prompt, greedy at temperature 0, and what plain decoding gives it alone."""
    draws = [{"temperature": temperature, "seed": seed + i} if temperature else {} for i in range(len(prompts))]
    limits, alone = [new_tokens(n_new, **each) for each in draws], plain_engine(pair, 1)
    return limits, [tokens_of(alone.generate([p], each))[0] for p, each in zip(prompts, limits, strict=True)]


def tokens_of(responses: list[Response]) -> list[list[int]]:
    """Generated tokens of every response."""
    return [response.token_ids for response in responses]


def accepted_counts(responses: list[Response]) -> set[int]:
    """Accepted lengths that occurred."""
    return {step.n_accepted for response in responses for step in response.req_metrics.steps}


def letter_tokenizer(chat_template: str | None = None, letters: str = LETTERS) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are letters, by default five and a space."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, clean_up_tokenization_spaces=False
    )


def is_empty(engine: Engine) -> bool:
    """Whether no request has left anything behind: none is unfinished, no slot in use, no result under way."""
    runner = engine.runner
    return engine.book.is_empty and not runner._results and not runner.state.state[RUNNING].any()


def tree_runner(
    target: Path,
    tree: FlatTree | GrownTree,
    *,
    draft: Path | None = None,
    n_slots: int = 1,
    dtype: torch.dtype = torch.float64,
) -> DeviceRunner:
    """A runner that verifies one tree a step: the draft's, or one whose tokens are written to `state.step.drafted`."""
    model = load_target(target, dtype=dtype)
    head = load_draft(draft, model.geometry, dtype=dtype) if draft else None
    models = pack_checkpoints(model, head, device=torch.device("cpu"), block=4, packs=False)
    in_flight = max(tree.n_nodes, tree.beam_rows + tree.max_depth if isinstance(tree, GrownTree) else 0)
    sizes = DeviceSizes(n_slots, 64, 64 + in_flight, tree, chunk=64, span=64, block=4)
    return DeviceRunner(*models, sizes, arch=None, replayer=EagerReplayer())


def decoded(runner: DeviceRunner, prompts: list[list[int]], n: int) -> tuple[list[list[int]], list[RowOutcome]]:
    """`n` tokens of every prompt, all in slots from the first step on; and every row of a step."""
    tokens: list[list[int]] = [[] for _ in prompts]
    rows: list[RowOutcome] = []

    def collect() -> None:
        for outcome in runner.collect(everything=True):
            for row in outcome.rows:
                tokens[row.request_id] += row.tokens
            rows.extend(outcome.rows if outcome.step is not None else [])

    for slot, prompt in enumerate(prompts):
        runner.admit(slot, SlotRequest(slot, prompt, n, ()), Trace())
        collect()
    for step in range(n):
        if runner.state.state[RUNNING].any():
            runner.enqueue(len(prompts), step, Trace())
            collect()
    return [found[:n] for found in tokens], rows
