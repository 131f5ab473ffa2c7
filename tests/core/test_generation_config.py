"""What a request may ask for is checked when it is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eagle3core import ConfigError, GenerationConfig

pytestmark = pytest.mark.reference


def refusal(build: Callable[[], object]) -> ConfigError:
    """The error of `build`, which must have its three parts."""
    with pytest.raises(ConfigError) as caught:
        build()
    error = caught.value
    assert error.what
    assert str(error) == f"{error.what}\n  allowed: {error.allowed}\n  do: {error.remedy}"
    return error


@pytest.mark.parametrize("n", [0, -1, 1.0, None])
def test_at_least_one_new_token_is_asked_for(n: Any) -> None:
    assert refusal(lambda: GenerationConfig(max_new_tokens=n)).what == f"max_new_tokens is {n!r}"


@pytest.mark.parametrize(
    "changes",
    [{"stop_words": "end"}, {"stop_token_ids": 3}, {"stop_words": ("",)}, {"stop_words": (3,)}]
    + [{"stop_token_ids": value} for value in [("3",), (1.5,), (-1,), (2**31,)]],
)
def test_stops_are_sequences_of_ids_and_words(changes: dict[str, Any]) -> None:
    refusal(lambda: GenerationConfig(**changes))


def test_the_largest_token_id_is_one_that_a_device_can_hold() -> None:
    assert GenerationConfig(stop_token_ids=(2**31 - 1,)).stop_token_ids == (2**31 - 1,)
    error = refusal(lambda: GenerationConfig(stop_token_ids=(2**31,)))
    assert error.allowed == "token ids: integers from 0 to 2147483647"


def test_lists_of_stops_are_welcome() -> None:
    wanted: Any = {"stop_token_ids": [1, 2], "stop_words": ["end"]}
    config = GenerationConfig(**wanted)
    assert (config.stop_token_ids, config.stop_words) == ((1, 2), ("end",))


@pytest.mark.parametrize("value", [-1, True, 1.5, "2"])
def test_most_drafts_of_a_request_are_none_or_a_number_from_0_on(value: Any) -> None:
    error = refusal(lambda: GenerationConfig(max_draft_tokens=value))
    assert error.what == f"max_draft_tokens is {value!r}"
    assert error.allowed == "None or an integer of at least 0"
    assert GenerationConfig(max_draft_tokens=0).max_draft_tokens == 0
