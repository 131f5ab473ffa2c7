"""Every bug that no stage shows is found by the check of whole runs that it names, and a right engine passes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from block_accounts import assert_all_blocks_are_back, watched
from golden_trees import FORWARDS, check_level, check_tree, golden_runner, official_tree, rounds_of
from lettered import MOST_NEW, N_LETTERS, lettered_engine, lettered_pair
from rings import slow_but
from safetensors.torch import load_file, save_file
from tiny_engines import (
    Pair,
    drafting_engine,
    engine_config,
    new_tokens,
    plain_tokens,
    random_prompts,
    tokens_of,
    write_tiny_pair,
)

from eagle3core import DecodeError, Engine, GenerationConfig, InvariantViolated, RejectionAcceptance
from eagle3core.checkpoint import load_target
from eagle3core.lookup import LOOKUPS
from eagle3core.speculative import CacheDtype
from lab.errors import ExperimentError
from lab.parity import faults
from lab.probes.proofs.identity import compare_tokens

pytestmark = pytest.mark.reference

LENGTHS = [3, 9, 1, 17, 30]
TREE = {"use_dynamic_tree": True, "dynamic_tree_max_top_k": 3, "max_decoding_tokens": 12, "num_speculative_tokens": 4}
PLACES = ("trees", "small model", "look-ups", "blocks", "chains", "batches", "draws", "caches")
OF_THE_ACCOUNT = (AssertionError, InvariantViolated, DecodeError)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft that is often right by luck."""
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same six tokens."""
    changes = {"n_layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24, "taps": (0, 1), "seed": 7}
    return write_tiny_pair(tmp_path_factory.mktemp("small"), **changes)[0]


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair over sixteen tokens, whose texts do not run in circles at once."""
    return lettered_pair(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def letters_with_scales(letters: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same with what a cache in FP8 is divided by, of keys another than of values."""
    target = tmp_path_factory.mktemp("scaled") / "target"
    shutil.copytree(letters[0], target)
    tensors = load_file(target / "model.safetensors")
    for layer in range(load_target(target).geometry.n_layers):
        tensors |= {f"model.layers.{layer}.self_attn.{n}_scale": torch.tensor(v) for n, v in (("k", 0.05), ("v", 0.01))}
    save_file(tensors, target / "model.safetensors")
    return target, letters[1]


def with_fault(engine: Engine, name: str | None) -> Engine:
    """The engine, or one like it with a bug."""
    return engine if name is None else faults.plant_in_run(engine, name)


def drafts_of(engine: Engine) -> list[tuple[int, list[int]]]:
    """A list that fills with (request id, drafts) of every step."""
    found: list[tuple[int, list[int]]] = []
    collect = engine.runner.collect

    def watching(*, everything: bool) -> Any:
        outcomes = collect(everything=everything)
        found.extend((row.request_id, row.drafts) for out in outcomes if out.step is not None for row in out.rows)
        return outcomes

    engine.runner.collect = watching  # type: ignore[method-assign]
    return found


Broken = set[str]


def broken_tree(tiny: Pair, name: str | None) -> Broken:
    """Tokens against plain decoding, and the tree against the official code's."""
    prompts = random_prompts(LENGTHS)
    plain = plain_tokens(tiny, prompts, 20)
    engine = with_fault(drafting_engine(tiny, TREE), name)
    got = tokens_of(engine.generate(prompts, new_tokens(20)))
    broken = set() if compare_tokens(got, plain).held else {"tokens"}
    runner, official = golden_runner(), official_tree()
    change = None if name is None else faults.run_fault(name).change
    if change is not None:
        runner.change_programs(lambda program: faults.changed(program, change))
    try:
        for at, found in enumerate(rounds_of(runner, official)):
            check_tree(official, found, at)
            for level in range(1, FORWARDS + 1):
                check_level(official, found, at, level)
    except AssertionError:
        broken.add("drafts")
    return broken


def broken_small_model(tiny: Pair, small: Path, name: str | None) -> Broken:
    """Tokens against plain decoding, drafts against what the small model says alone, and the target as its own draft,
    all of whose drafts are right."""
    [prompt], k = random_prompts([11]), 3
    drafts_by = {"method": "draft_target", "num_speculative_tokens": k}
    engine = with_fault(drafting_engine(tiny, {**drafts_by, "model": str(small)}), name)
    drafts = drafts_of(engine)
    [response] = engine.generate([prompt], new_tokens(24))
    plain = plain_tokens(tiny, [prompt], 24)
    by_itself = Engine.from_pretrained(small, engine_config(tiny, None))
    texts = [[*prompt, *response.token_ids[: step.start]] for step in response.req_metrics.steps]
    own = [by_itself.generate([text], new_tokens(k))[0].token_ids for text in texts]
    broken = set() if compare_tokens([response.token_ids], plain).held else {"tokens"}
    of_itself = drafting_engine(tiny, {**drafts_by, "model": str(tiny[0])})
    steps = with_fault(of_itself, name).generate([prompt], new_tokens(24))[0].req_metrics.steps
    are_right = [each for _, each in drafts] == own and {step.n_accepted for step in steps if not step.cut} == {k}
    return broken | (set() if are_right else {"drafts"})


def broken_lookup(tiny: Pair, method: str, name: str | None) -> Broken:
    """Tokens against plain decoding, and what is counted of the drafts against a look-up of each request's own."""
    prompts, k = random_prompts(LENGTHS), 4
    engine = with_fault(drafting_engine(tiny, {"method": method, "num_speculative_tokens": k}), name)
    responses = engine.generate(prompts, new_tokens(24))
    plain = plain_tokens(tiny, prompts, 24)
    broken = set() if compare_tokens(tokens_of(responses), plain).held else {"tokens"}
    for prompt, response in zip(prompts, responses, strict=True):
        for step in response.req_metrics.steps:
            lookup = LOOKUPS[method]()
            lookup.extend([*prompt, *response.token_ids[: step.start]])
            drafts, follows = lookup.propose(k), response.token_ids[step.start :]
            agreeing = next((i for i, t in enumerate(drafts) if [t] != follows[i : i + 1]), len(drafts))
            if step.n_draft != len(drafts) or not (step.cut or step.n_accepted == agreeing):
                broken.add("drafts")
    return broken


def shared_texts() -> list[list[int]]:
    """Texts with one beginning, gone on otherwise at several places, and one whose second block alone is another's."""
    [common] = random_prompts([44], n_vocab=N_LETTERS, seed=3)
    ends = random_prompts([3, 9, 5], n_vocab=N_LETTERS, seed=4)
    return [common, common[:40], [*common[:24], *ends[0]], [*common[:11], *ends[1]], [*ends[2][:4], *common[4:20], 1]]


def broken_blocks(letters: Pair, name: str | None) -> Broken:
    """Tokens against plain decoding, blocks by their account, drafts against those of a cold cache."""
    texts = shared_texts()
    plain = plain_tokens(letters, texts, MOST_NEW)
    engine = lettered_engine(letters, 3, 4, 1, prefix_cache=True, block_size=2, cache_blocks=60)
    spoiled = with_fault(engine, name)
    spoiled.runner.n_behind = 1
    broken: Broken = set()
    try:
        watched(spoiled)
        for _ in range(2):
            if not compare_tokens(tokens_of(spoiled.generate(texts, new_tokens(MOST_NEW))), plain).held:
                broken.add("tokens")
        assert_all_blocks_are_back(spoiled)
    except OF_THE_ACCOUNT:
        return broken | {"account"}
    return broken | broken_continued(letters, texts, plain, name)


def broken_continued(letters: Pair, texts: list[list[int]], plain: list[list[int]], name: str | None) -> Broken:
    """Answers that are asked on, one at a time, against an engine that finds nothing kept."""
    found = []
    for keeps in (True, False):
        engine = with_fault(lettered_engine(letters, 3, 1, 0, prefix_cache=keeps, block_size=2), name)
        engine.runner.n_behind = 0
        drafts = drafts_of(engine)
        for text, answer in zip(texts, plain, strict=True):
            for n in (9, MOST_NEW):
                engine.generate([text], new_tokens(n))
                engine.generate([[*text, *answer[:n]]], new_tokens(4))
        found.append([each for _, each in drafts])
    return set() if found[0] == found[1] else {"drafts"}


def broken_chain(
    letters: Pair, name: str | None, *, n_slots: int = 1, cache: CacheDtype = "as_computed", **drawn: float | int
) -> Broken:
    """Tokens against plain decoding, or of drawn ones shares; drafts against those of an engine without a bug."""
    prompts = random_prompts(LENGTHS, n_vocab=N_LETTERS)
    fields: dict[str, Any] = {"num_speculative_tokens": 4, "draft_cache_dtype": cache}
    fields |= {"acceptance": RejectionAcceptance()} if drawn else {}
    found = []
    for bug in (None, name):
        engine = with_fault(drafting_engine(letters, fields, max_batch_size=n_slots, cache_dtype=cache), bug)
        drafts = drafts_of(engine)
        settings = GenerationConfig(max_new_tokens=24, ignore_eos=True, **drawn)
        answers = tokens_of(engine.generate(prompts, settings))
        found.append((answers, sorted((id_ % len(prompts), each) for id_, each in drafts)))
    (right, expected), (answers, got) = found
    if drawn:
        return set() if expected == got else {"shares"}
    broken = set() if right == answers else {"tokens"}
    return broken | (set() if broken or expected == got else {"drafts"})


@pytest.fixture
def checks(
    tiny: Pair, small: Path, letters: Pair, letters_with_scales: Pair
) -> dict[str, Callable[[str | None], Broken]]:
    """What fails of an engine with a bug, by where the bug may be."""
    return {
        "trees": partial(broken_tree, tiny),
        "small model": partial(broken_small_model, tiny, small),
        "look-ups": lambda name: broken_lookup(tiny, "ngram", name) | broken_lookup(tiny, "suffix", name),
        "blocks": partial(broken_blocks, letters),
        "chains": partial(broken_chain, letters),
        "batches": partial(broken_chain, letters, n_slots=8),
        "draws": partial(broken_chain, letters, temperature=1.0, seed=5),
        "caches": partial(broken_chain, letters_with_scales, n_slots=3, cache="fp8"),
    }


@pytest.mark.parametrize("where", PLACES)
def test_a_right_engine_passes_every_check(checks: dict[str, Callable[[str | None], Broken]], where: str) -> None:
    assert checks[where](None) == set()


def one_of_each_kind() -> list[str]:
    """A bug for every place and every check."""
    kinds = {(fault.where, fault.found_by): name for name, fault in sorted(faults.RUN_FAULTS.items())}
    return list(kinds.values())


@pytest.mark.parametrize("name", slow_but(one_of_each_kind(), sorted(faults.RUN_FAULTS)))
def test_a_planted_bug_is_found_by_the_check_it_names(
    checks: dict[str, Callable[[str | None], Broken]], name: str
) -> None:
    fault = faults.run_fault(name)
    broken = checks[fault.where](name)
    assert fault.found_by in broken
    if fault.found_by == "drafts":
        assert "tokens" not in broken, "verification hides it"


def test_bugs_of_every_kind_of_drafting_and_of_the_cache_are_there_to_plant() -> None:
    planted = {(fault.where, fault.found_by) for fault in faults.RUN_FAULTS.values()}
    assert {where for where, _ in planted} == set(PLACES)
    assert {("trees", "tokens"), ("trees", "drafts"), ("blocks", "account"), ("blocks", "tokens")} <= planted
    assert all((fault.change is None) != (fault.spoil is None) for fault in faults.RUN_FAULTS.values())
    assert not faults.RUN_FAULTS.keys() & faults.FAULTS.keys()


@pytest.mark.parametrize("name", [n for n, fault in sorted(faults.RUN_FAULTS.items()) if fault.where == "trees"])
def test_kernels_stay_in_a_spoiled_program(tiny: Pair, name: str) -> None:
    """A bug adds calls beside those that ship; it takes none away, and the engine beside it stays right."""
    engine = drafting_engine(tiny, TREE)
    programs = dict(engine.runner.programs)
    ops = [[call.op for stage in program for call in stage.calls] for program in engine.runner.all_programs]
    spoiled = faults.plant_in_run(engine, name).runner.all_programs
    kept = [[c.op for stage in program for c in stage.calls if c.op != "planted"] for program in spoiled]
    assert kept == ops
    assert any(c.op == "planted" for program in spoiled for stage in program for c in stage.calls)
    assert engine.runner.programs == programs


def test_words_of_siblings_are_those_of_a_plain_walk() -> None:
    from lab.parity.faults.of_trees import _own_bits, _with_siblings

    parents = torch.tensor([[-1, 0, 0, 0, 1, 1, *[5] * 40]])
    own = _own_bits(parents.shape[1], torch.device("cpu"))
    seen = _with_siblings(own[None].clone(), parents, own)
    bits = [{j for j in range(parents.shape[1]) if int(row[j // 32]) >> (j % 32) & 1} for row in seen[0]]
    of = parents[0].tolist()
    assert bits == [{i, i - 1} if i and of[i] == of[i - 1] else {i} for i in range(len(of))]


def test_an_unknown_bug_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ExperimentError, match=r"fault is 'gremlin'[\s\S]*tree_positions"):
        faults.run_fault("gremlin")
