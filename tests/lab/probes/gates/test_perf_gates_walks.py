"""The walk of a planted pair, known before it is run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.pairs.planted import share_for_length
from lab.pairs.planted.tokens import plan_tokens
from lab.probes.gates.config import GatesConfig, load_gates, packaged_gates
from lab.probes.gates.walks import Cycle, plan_walks, planned_length

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def config() -> GatesConfig:
    return load_gates(packaged_gates())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.integers(1, 7), st.integers(2, 80), st.integers(0, 63))
def test_a_walk_is_what_drafting_by_the_map_gives(seed: int, share: float, k: int, n_tokens: int, start: int) -> None:
    tokens = plan_tokens(100, 64, share, seed)
    walk = Cycle(tokens, k).walk(start, n_tokens)
    index = {int(token): i for i, token in enumerate(tokens.draft_to_target)}
    out = tokens.follow(walk.end, n_tokens)
    done, n_steps, committed = 1, 0, []
    while done < n_tokens:
        accepted, root = 0, out[done - 1]
        while accepted < k and bool(tokens.right[index[root]]):
            accepted, root = accepted + 1, int(tokens.successor[root])
        n_steps += 1
        if done + accepted + 1 <= n_tokens:
            committed.append(accepted + 1)
        done += accepted + 1
    assert (walk.n_steps, walk.n_complete, walk.n_committed) == (n_steps, len(committed), sum(committed))


@pytest.mark.parametrize(("length", "steps", "n_requests"), [(3.0, 512, 1), (2.2, 128, 4)])
def test_prompts_are_ended_where_the_length_is_met_and_the_steps_are_made(
    config: GatesConfig, length: float, steps: int, n_requests: int
) -> None:
    [mode] = [mode for mode in config.mode if mode.acceptance_length == length]
    tokens = plan_tokens(128256, 32000, share_for_length(length, 3), 0)
    n_tokens = mode.tokens("micro", is_planted=True)
    walks = plan_walks(Cycle(tokens, 3), n_requests=n_requests, n_tokens=n_tokens, least_length=length)
    assert len({walk.end for walk in walks}) == n_requests
    for walk in walks:
        assert length <= walk.length < 1.01 * length
        assert walk.n_steps - 3 >= steps, "two steps warm up, the last one may be cut"
    assert length <= planned_length(walks) < 1.01 * length


def test_where_no_place_gives_the_length_it_is_the_most_there_is() -> None:
    tokens = plan_tokens(100, 64, 0.0, 0)
    [walk] = plan_walks(Cycle(tokens, 3), n_requests=1, n_tokens=20, least_length=2.0)
    assert walk.length == 1.0


def test_a_trained_pair_gets_tokens_for_the_case_that_every_draft_is_accepted(config: GatesConfig) -> None:
    mode = config.find("single32k")
    assert mode.tokens("micro", is_planted=False) >= 4 * mode.micro.steps
    assert mode.tokens("micro", is_planted=True) >= 3.0 * mode.micro.steps
