"""A bench of weights or caches in fp8: the planted tokens, less to read, and rows that are series of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_bench import SCENARIO, K, rows_by_name

from lab.pairs.planted import GEOMETRIES
from lab.probes.bench import memory
from lab.probes.bench.results import wrong_tokens
from lab.probes.bench.run import Bench
from lab.rows.store import Row

pytestmark = pytest.mark.reference

CACHES = {"cache_dtype": "fp8", "draft_cache_dtype": "fp8"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def bench_of(**formats: Any) -> list[Row]:
    """Rows of the engine without drafts and with them, where some of it is in these formats."""
    return Bench(replace(SCENARIO, peers=(), rounds=1, **formats), tell=lambda _: None).run().rows


@pytest.fixture(scope="module")
def usual() -> dict[str, Row]:
    """Rows of the same bench with everything as it is stored, by name."""
    return rows_by_name(bench_of())


def floor_bytes(row: Row) -> float:
    """What a floor's time is of, which no ceiling measured beside it moves."""
    milliseconds, rate = row.number("floor_ms"), row.number("ceiling_gb_per_s")
    assert milliseconds is not None
    assert rate is not None
    return milliseconds * rate


def test_a_draft_in_fp8_commits_the_planted_tokens_and_is_a_series_of_its_own(usual: dict[str, Row]) -> None:
    plain, speculative = bench_of(draft_weights="fp8")
    assert "draft_weights" not in plain.parameters
    assert speculative.parameters["draft_weights"] == "fp8"
    assert not wrong_tokens(speculative.values)
    stored = usual[speculative.name]
    assert "draft_weights" not in stored.parameters
    assert speculative.number("acceptance_length") == stored.number("acceptance_length")
    assert speculative.number("step_over_base_bound") < stored.number("step_over_base_bound")
    geometry = GEOMETRIES["nano"]
    at = {"ks": (0, K), "batch": 1, "session_len": 64, "itemsize": 4, "device": torch.device("cpu")}
    whole, half = (
        memory.plan(geometry.target, geometry.draft, **at, n_peers=1, draft_weights=weights)
        for weights in ("as_stored", "fp8")
    )
    assert half.weight_bytes < whole.weight_bytes
    assert half.peer_bytes == whole.peer_bytes, "a peer's copy is as stored"


def test_caches_in_fp8_are_the_engines_and_a_series_of_their_own(usual: dict[str, Row]) -> None:
    plain, speculative = bench_of(**CACHES)
    assert (plain.parameters["cache_dtype"], speculative.parameters["draft_cache_dtype"]) == ("fp8", "fp8")
    assert "draft_cache_dtype" not in plain.parameters
    assert not wrong_tokens(plain.values)
    assert not wrong_tokens(speculative.values)
    assert floor_bytes(plain) < floor_bytes(usual[plain.name])
    assert not {"cache_dtype", "draft_cache_dtype"} & set(usual[plain.name].parameters)
    geometry = GEOMETRIES["nano"]
    at = {"ks": (0, K), "batch": 1, "session_len": 64, "itemsize": 4, "device": torch.device("cpu"), "n_peers": 1}
    whole, quarter = (memory.plan(geometry.target, geometry.draft, **at, **each) for each in ({}, CACHES))
    assert (4 * quarter.kv_bytes, quarter.peer_bytes) == (whole.kv_bytes, whole.peer_bytes)


def test_a_target_in_fp8_commits_the_planted_tokens_and_its_rows_are_series_of_their_own(usual: dict[str, Row]) -> None:
    for row in bench_of(target_weights="fp8"):
        assert row.parameters["target_weights"] == "fp8"
        assert not wrong_tokens(row.values)
        stored = usual[row.name]
        assert "target_weights" not in stored.parameters
        assert floor_bytes(row) < floor_bytes(stored)
