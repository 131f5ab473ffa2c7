"""Attention over a tree's nodes whose rows add their ancestors in the places that plain decoding gives them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_sources import rebuilt
from rings import exhaustive_but, slow_but
from torch import Tensor

from eagle3core.errors import KernelLimit
from eagle3core.kernels import proof
from eagle3core.kernels.attention import layout, mask, paths, rows, tile
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.launcher import MOST_PATH
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.paths import tail_units
from eagle3core.kernels.attention.plan import choose_plan, order_of
from eagle3core.kernels.attention.variant import PATHS_PARAMETERS, attention_variant
from eagle3core.kernels.card import SHARED_BYTES, Case
from eagle3core.kernels.emulator import instructions as emulator

CPU = torch.device("cpu")
TINY: Case = {"dtype": "bf16", "dim": 64, "heads": 2, "kv_heads": 1, "order": (2, 2), "tree": "random"}


def emulated(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return proof.run(CARD, "sm_90a", case, inputs, emulator.execute, {})


def rows_that_differ(case: Case, by_paths: Case, seed: int) -> list[int]:
    """Rows of a pass over `case` whose bits are not those of plain decoding after the row's own ancestors."""
    inputs = CARD.example(case, proof.generator(seed, CPU), CPU)
    outputs = emulated(case, inputs)
    wrong = []
    for row in range(CARD.n_rows(case)):
        alone, own = CARD.alone(by_paths, inputs, row)
        single = CARD.row_of(alone, own, emulated(alone, own), 0)["out"]
        together = CARD.row_of(case, inputs, outputs, row)["out"]
        if not torch.equal(single.view(torch.int16), together.view(torch.int16)):
            wrong.append(row)
    return wrong


@pytest.mark.emulated
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 40), st.integers(2, 8), st.sampled_from([1, 2, 3]), st.integers(0, 99))
def test_a_node_has_the_bits_of_plain_decoding_after_its_ancestors(
    prefix: int, nodes: int, group: int, seed: int
) -> None:
    case = {**TINY, "heads": group, "prefix": (prefix,), "tokens": nodes, "paths": True}
    assert rows_that_differ(case, case, seed) == []


@pytest.mark.slow
@pytest.mark.emulated
@settings(max_examples=2, deadline=None)
@given(st.integers(0, 140), st.integers(17, 40), st.sampled_from([(2, 2), (4, 2)]), st.integers(0, 99))
def test_a_node_of_a_large_tree_has_the_bits_of_plain_decoding(
    prefix: int, nodes: int, order: tuple[int, int], seed: int
) -> None:
    case = {**TINY, "order": order, "prefix": (prefix, 30), "tokens": nodes, "paths": True}
    assert rows_that_differ(case, case, seed) == []


@pytest.mark.emulated
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 90), st.integers(2, 8), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_a_node_sees_its_window_by_position_to_the_bits_of_plain_decoding(
    prefix: int, nodes: int, window: int, sinks: bool, seed: int
) -> None:
    case = {**TINY, "prefix": (prefix,), "tokens": nodes, "window": window, "sinks": sinks, "paths": True}
    assert rows_that_differ(case, case, seed) == []


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize(
    ("prefix", "nodes", "tree"),
    exhaustive_but([(140, 4, "random")], [(140, 4, "random"), (3, 9, "chain"), (200, 9, "chain")]),
)
def test_nodes_of_gpt_oss_heads_have_the_bits_of_plain_decoding_under_its_window(
    prefix: int, nodes: int, tree: str
) -> None:
    """Eight queries of 64 a key head, a window of 128, sinks: the target's own launch, by its own order of sums."""
    sizes = {"heads": 8, "order": order_of("sm_90a", 8, 64), "prefix": (prefix,), "tokens": nodes, "tree": tree}
    case = {**TINY, **sizes, "window": 128, "sinks": True, "paths": True}
    assert rows_that_differ(case, case, 5) == []


PLANTED = {
    # name: (module, factory, pattern, replacement)
    "a key too many of the window": (
        mask, "make_hide", r"position \+ 1 - \(behind >> EARLIER_BITS\) - first, 0\), UNIT",
        "position - (behind >> EARLIER_BITS) - first, 0), UNIT",
    ),
    "the window of a node's own places forgotten": (
        paths, "make_paths", r"i32\(n_seen - \(behind >> EARLIER_BITS\)\)", "i32(0)",
    ),
    "a first unit too late": (layout, "make_span", r"nearest >> 4\), i32\(after", "(nearest >> 4) + 1), i32(after"),
    "units that some nodes see in part taken whole": (layout, "make_span", r"i32\(after - window\)", "i32(0)"),
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_of_windows_in_trees_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a window that hides old keys from some nodes, or one that hides the root from its last descendants."""
    window = 5 if "own places" in bug else 20
    case = {**TINY, "prefix": (75,), "tokens": 7, "window": window, "tree": "chain", "paths": True}
    inputs = CARD.example(case, proof.generator(4, CPU), CPU)
    module, factory, pattern, replacement = PLANTED[bug]

    def is_right() -> bool:
        return all(d.passes for d in proof.deviations(CARD, case, inputs, emulated(case, inputs)))

    assert is_right()
    rebuilt(module, pattern, replacement, monkeypatch, factory, (rows, tile))
    assert not is_right(), bug


@pytest.mark.emulated
def test_in_the_places_of_the_cache_a_tree_has_other_bits() -> None:
    """What paths are for: the same pass without them, judged by the same rows."""
    case = {**TINY, "prefix": (29,), "tokens": 9}
    wrong = rows_that_differ(case, {**case, "paths": True}, 1)
    assert wrong
    assert 0 not in wrong, "the root stands where it stands"


@pytest.mark.reference
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize(("dim", "group"), [(64, 2), (64, 8), (128, 4), (128, 8), (128, 16)])
def test_every_tree_up_to_64_nodes_fits_shared_memory_beside_its_sets(arch: str, dim: int, group: int) -> None:
    shape = Shape("bf16", dim, group, *order_of(arch, 8, dim))
    for tokens in (1, 2, 8, 17, 33, 60, 64):
        plan = choose_plan(arch, shape, tokens, 1, 8, paths=True)
        variant = attention_variant(arch, shape, tokens, plan, paths=True)
        assert plan.row_warps
        assert plan.stages >= (2 if plan.grouped else 3)
        assert variant.shared_bytes <= SHARED_BYTES[arch]
        assert variant.parameters[: len(PATHS_PARAMETERS)] == PATHS_PARAMETERS
        assert f"_paths{tail_units(tokens)}" in variant.name


@pytest.mark.emulated
@pytest.mark.parametrize("prefix", slow_but([15], [0, 15, 63]))
def test_the_longest_path_fits_its_places_wherever_the_prefix_ends(prefix: int) -> None:
    case = {**TINY, "prefix": (prefix,), "tokens": MOST_PATH, "paths": True, "tree": "chain"}
    assert rows_that_differ(case, case, 3) == []


@pytest.mark.reference
def test_a_longer_path_is_refused() -> None:
    case = {**TINY, "prefix": (3,), "tokens": MOST_PATH + 1, "paths": True, "tree": "chain"}
    inputs = CARD.example(case, proof.generator(1, CPU), CPU)
    with pytest.raises(KernelLimit, match="paths of 18 tokens in a tree"):
        CARD.launches("sm_90a", case, inputs, CARD.outputs(case, inputs))


@pytest.mark.reference
def test_paths_exclude_earlier_keys() -> None:
    case = {**TINY, "prefix": (20,), "tokens": 3, "paths": True, "earlier": 4}
    inputs = CARD.example(case, proof.generator(1, CPU), CPU)
    with pytest.raises(AssertionError, match="paths are of the nodes of one pass"):
        CARD.launches("sm_90a", case, inputs, CARD.outputs(case, inputs))


@pytest.mark.reference
@pytest.mark.parametrize("nodes", [1, 2, 17, 60, 64])
def test_there_is_room_for_the_nodes_wherever_the_prefix_ends(nodes: int) -> None:
    needed = max(-(-(offset + nodes) // 16) for offset in range(16))
    assert tail_units(nodes) == needed
