"""Attention by warpgroups: when a plan chooses it, what is refused, and the registers of what is compiled."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from rings import exhaustive_but
from warpgroup_cases import ARCH, LONG, SHAPE

from eagle3core.errors import ConfigError, KernelLimit
from eagle3core.kernels.attention.card import CARD
from eagle3core.kernels.attention.layout import Shape
from eagle3core.kernels.attention.overrides import KV_TILE, MAX_TILES, WARPGROUPS
from eagle3core.kernels.attention.plan import Plan, choose_plan, order_of, ruled_plan
from eagle3core.kernels.attention.variant import attention_variant
from eagle3core.kernels.card import SHARED_BYTES
from eagle3core.kernels.compile import compile_variant


@pytest.mark.reference
def test_a_variable_says_whether_warpgroups_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WARPGROUPS, "0")
    assert not choose_plan(ARCH, SHAPE, 64, 1, 8, 32768, paths=True).grouped
    for asked in ("1", ""):
        monkeypatch.setenv(WARPGROUPS, asked)
        assert choose_plan(ARCH, SHAPE, 64, 1, 8, 32768, paths=True).grouped
    for arch in ("sm_80", "sm_100", "sm_120"):
        assert not choose_plan(arch, SHAPE, 64, 1, 8, 32768, paths=True).grouped
    assert choose_plan(ARCH, SHAPE, 64, 1, 8, 512).grouped
    assert not choose_plan(ARCH, SHAPE, 1, 1, 8, 512).grouped, "a warpgroup has 64 rows"
    monkeypatch.setenv(KV_TILE, "32")
    monkeypatch.setenv(MAX_TILES, "2")
    chosen = choose_plan(ARCH, SHAPE, 16, 1, 8, 512)
    assert (chosen.units, chosen.stages) == (2, 2)
    monkeypatch.setenv(WARPGROUPS, "yes")
    with pytest.raises(ConfigError, match=WARPGROUPS):
        choose_plan(ARCH, SHAPE, 64, 1, 8, 32768, paths=True)


@pytest.mark.reference
@pytest.mark.parametrize(
    "setting", [{"row_warps": 2, "groups": 2, "units": 2}, {"units": 2}, {"row_warps": 8, "groups": 2}, {"stages": 1}]
)
def test_warps_that_are_no_warpgroups_are_refused_and_not_waited_for(setting: dict[str, int]) -> None:
    plan = replace(ruled_plan(ARCH, SHAPE, 32, 1, 8, grouped=True), **setting)
    with pytest.raises(KernelLimit, match="set grouped=False"):
        attention_variant(ARCH, SHAPE, 32, plan)


@pytest.mark.reference
@pytest.mark.parametrize("dim", [64, 128])
def test_every_tree_fits_beside_two_stages_of_a_ring(dim: int) -> None:
    for query_heads, tokens in product((1, 4, 8, 16), (4, 16, 17, 33, 64)):
        shape = Shape("bf16", dim, query_heads, *order_of(ARCH, 8, dim))
        if tokens * query_heads < 64:
            continue
        plan = ruled_plan(ARCH, shape, tokens, 1, 8, paths=True, grouped=True)
        variant = attention_variant(ARCH, shape, tokens, plan, paths=True)
        assert plan.stages >= 2
        assert plan.row_warps * plan.groups == 8
        assert variant.shared_bytes <= SHARED_BYTES[ARCH]


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("tokens", exhaustive_but([64], [16, 64]))
def test_a_launch_has_the_registers_that_its_warps_give_each_other(tokens: int) -> None:
    """Those that multiply wait until there are 232 for each: what fetching warps give back is just enough."""
    plan = ruled_plan(ARCH, SHAPE, tokens, 1, 8, paths=True, grouped=True)
    variant = attention_variant(ARCH, SHAPE, tokens, plan, paths=True)
    made = compile_variant(variant, ARCH, disassemble=True)
    assert made.faults(variant) == []
    assert made.registers == 168
    assert made.sass["USETMAXREG"] == 2


@pytest.mark.reference
def test_a_plan_walks_across_streams_where_all_sessions_are_short() -> None:
    def plan(tokens: int, batch: int, keys: int, *, paths: bool = False) -> Plan:
        return choose_plan(ARCH, SHAPE, tokens, batch, 8, keys, paths=paths)

    assert [plan(64, 8, keys).short for keys in (600, 4096, 32768)] == [True, True, False]
    assert not plan(64, 1, 600, paths=True).short, "in a step trees lose by it"
    assert not plan(16, 4, 600).short, "two groups of warps hand the sums of a split on"
    assert not plan(8, 1, 600).short, "warps by themselves"
    of_64 = replace(SHAPE, dim=64, streams=8)
    assert choose_plan(ARCH, of_64, 64, 8, 8, 600).short
    assert not choose_plan(ARCH, replace(SHAPE, streams=2), 64, 8, 8, 600).short, "a set reaches beyond a split"


@pytest.mark.reference
def test_blocks_that_have_all_keys_of_their_rows_launch_no_combination() -> None:
    def launched(tokens: int, batch: int, keys: int, **about: Any) -> list[str]:
        case = {**LONG, "paths": False, "prefix": (keys - tokens,) * batch, "tokens": tokens, **about}
        return [variant.name for variant in CARD.variants_of(ARCH, case)]

    for keys in (600, 32768):
        [one_block] = launched(32, 16, keys)
        assert "_whole" in one_block
        assert "_c2" not in one_block
        [only] = launched(64, 8, keys)
        assert "_whole_c2" in only, "two blocks of rows, which fetch for each other"
        assert len(launched(64, 1, keys)) == 2, "a sequence by itself fills the processors by its splits"
        assert len(launched(64, 8, keys, paths=True)) == 2
        assert len(launched(64, 8, keys, earlier=30)) == 2
        assert len(launched(64, 8, keys, fp8=True)) == 2
