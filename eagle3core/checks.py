"""Checks of single settings: each refuses a value with its name, its range and a remedy."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3core.errors import ConfigError, shown

MAX_ID = (1 << 31) - 1  # ids travel to the device as int32
MOST_WINDOW = (1 << 22) - 1  # positions; attention keeps other numbers in the other bits


def require_flag(name: str, value: object) -> None:
    """That a value is True or False, or a ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}", "True or False", f"set {name} to one of them")


def is_count(value: object) -> bool:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def require_count(name: str, value: object, most: int = MAX_ID) -> None:
    """That a value is an integer from 1 to `most`, or a ConfigError."""
    if not is_count(value) or (isinstance(value, int) and value > most):
        allowed = "an integer of at least 1" if most == MAX_ID else f"an integer from 1 to {most}"
        raise ConfigError(f"{name} is {shown(value)}", allowed, f"set {name} in that range")


def require_ids(name: str, value: object, what: str) -> None:
    """That a value is a tuple of ids, or a ConfigError that says what they are ids of."""
    if not isinstance(value, tuple) or not all(_is_id(i) for i in value):
        raise ConfigError(
            f"{name} is {shown(value)}", f"{what}: integers from 0 to {MAX_ID}", f"give {name} as a tuple of them"
        )


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """That a value is one of a few names, or a ConfigError that lists them."""
    if value not in choices:
        raise ConfigError(f"{name} is {shown(value)}", f"one of {tuple(choices)}", f"set {name} to one of them")


def check_taps(layers: tuple[int, ...] | None, convention: object, method: str) -> None:
    """That ids of tapped layers come with the convention that numbers them and a method that has a choice of them, or
    a ConfigError."""
    if method == "eagle" and (layers is not None or convention is not None):
        raise ConfigError(
            f"capture_layers is {shown(layers)} with method 'eagle'",
            "none: such a head reads the target's last state alone",
            "leave capture_layers and capture_convention out",
        )
    require_ids("capture_layers", layers or (), "layer ids")
    if (layers is None) != (convention is None):
        raise ConfigError(
            f"capture_layers is {layers!r} with capture_convention {convention!r}",
            "both, or neither: the same ids mean different tensors in the two conventions",
            "add capture_convention='input' (id i is what layer i reads) or 'output' (what layer i writes)",
        )
    if convention not in (None, "input", "output"):
        raise ConfigError(f"capture_convention is {convention!r}", "'input' or 'output'", "name one of the two")


def check_feedback(norm_output: object, method: str) -> None:
    """That a meaning of a head's key `norm_output` is one of the two there are, for a head that may have it, or a
    ConfigError."""
    if norm_output is None:
        return
    if method == "eagle":
        raise ConfigError(
            f"norm_output is {shown(norm_output)} with method 'eagle'",
            "none: such a head has no norm behind its layer",
            "leave norm_output out",
        )
    require_choice("norm_output", norm_output, ("feedback", "head"))


def check_window(window: object, is_of_head: bool, depth: int) -> None:
    """That a window of the draft is a head's and holds its own deepest path, or a ConfigError."""
    if window is None:
        return
    if not is_count(window) or not depth < window <= MOST_WINDOW:  # type: ignore[operator]
        allowed = f"None, or an integer from {depth + 1}, num_speculative_tokens + 1, to {MOST_WINDOW}"
        raise ConfigError(f"draft_window is {shown(window)}", allowed, "raise it, or leave it out")
    if not is_of_head:
        raise ConfigError(f"draft_window is {window} without a head", "a head that drafts", "leave it out")


def check_lengths(drafts: int, path: int, nodes: int) -> None:
    """That the longest path and the nodes of a step leave room for each other and for the drafts, or a ConfigError."""
    if path > nodes:
        raise ConfigError(
            f"max_path_len is {path} with max_decoding_tokens {nodes}",
            "max_path_len <= max_decoding_tokens",
            f"raise max_decoding_tokens to {path} or lower max_path_len",
        )
    if path < drafts + 1 or nodes < drafts + 1:
        raise ConfigError(
            f"num_speculative_tokens is {drafts} with max_path_len {path} and max_decoding_tokens {nodes}",
            f"both limits at least num_speculative_tokens + 1 = {drafts + 1} (the root counts)",
            "leave both limits out to have them derived",
        )


def is_given(value: object) -> bool:
    """Whether a setting says anything; of an array, which has no truth of its own, too."""
    return not (value is None or value is False or (isinstance(value, str | tuple) and not value))
