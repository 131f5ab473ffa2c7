"""Damage: a valid JSON value or byte string becomes one that somebody else might have written, cut or bent.

Values are damaged where their structure is (a key dropped, a list where a number stood), texts and bytes where their
form is (cut short, a bit turned, a key twice).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

DIGITS = 400
DEEP = 5000
LONG = 5000
# Values that stand where others are meant. A text that is no JSON value by itself is marked by `Raw`.
ODD_TEXTS = (
    "", " ", "\x00", "a\nb", "\ud800", "é", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "\u202egnp", "null", "true", "NaN", "-1", "1e999", "0x10",
    "../../canary", "/etc/passwd", "a" * LONG, "%s%n{0}", "{{ 7 * 7 }}", "'; import os", "__class__", "𝟙𝟚",
)  # fmt: skip
ODD_NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**31) - 1,
    10**12, 10**DIGITS, -(10**DIGITS), 0.0, -0.0, 0.5, 1.5, 1e-320, 1e-8, 1e30, 1e308, -1e308, float("nan"),
    float("inf"), float("-inf"),
)  # fmt: skip


class Raw(str):
    """A text that goes into JSON as it stands."""


ODD_RAWS = (
    Raw("[" * DEEP + "]" * DEEP),
    Raw('{"a":' * DEEP + "1" + "}" * DEEP),
    Raw("9" * 5000),
    Raw("1e99999"),
    Raw("-"),
    Raw('"\\ud800\\udc00\\ud800"'),
    Raw('"\\u0000"'),
    Raw("tru"),
    Raw("'a'"),
    Raw("0001"),
)


def odd_value(random: Random) -> Any:
    """Any value that nobody meant."""
    kind = random.randrange(9)
    if kind < 3:
        return random.choice(ODD_NUMBERS)
    if kind < 5:
        return random.choice(ODD_TEXTS)
    if kind == 5:
        return random.choice((None, True, False))
    if kind == 6:
        return random.choice(([], {}, [[]], [None], [0] * 1000, {"": ""}, {"a": {"a": {"a": {}}}}, [1.5, "a", None]))
    return random.choice(ODD_RAWS) if kind == 7 else [odd_value(random) for _ in range(random.randrange(1, 4))]


def damaged_value(value: Any, random: Random, n: int | None = None) -> Any:
    """A copy of a JSON value with one to three places damaged."""
    copy = deepcopy(value)
    for _ in range(n or random.choice((1, 1, 1, 2, 3))):
        places = list(_places(copy))
        if not places:
            return odd_value(random)
        random.choice(_DAMAGES)(*random.choice(places), random)
    return copy


def damaged_text(value: Any, random: Random) -> bytes:
    """A JSON value as bytes, damaged in its structure, in its form, or in both."""
    kind = random.randrange(10)
    data = as_bytes(damaged_value(value, random) if kind < 8 else value)
    if kind == 7 or kind == 8:
        return damaged_bytes(data, random)
    if kind == 9:
        return random.choice(_WHOLE)(data, random)
    return data


def long_text(random: Random) -> bytes:
    """Some megabytes of JSON that take many times as much once they are values."""
    n = random.choice((100_000, 1_000_000, 12_000_000))
    parts = (b"[],", b"{},", b'{"a":1},', b'"ab",', b"1.5,", b'"\xc3\xa9\xf0\x9f\x98\x80",', b"[[[[[[[[[[1]]]]]]]]]],")
    part = random.choice(parts)
    if random.random() < 0.2:
        return b"{" + b",".join(b'"%x":1' % i for i in range(n // 10)) + b"}"
    return b'{"a":[' + part * (n // len(part)) + b"1]}"


def damaged_bytes(data: bytes, random: Random) -> bytes:
    """Bytes with one to four places cut, turned, doubled, blanked or filled in."""
    for _ in range(random.randrange(1, 5)):
        if not data:
            return random.randbytes(random.randrange(20))
        at, n = random.randrange(len(data)), random.choice((1, 1, 2, 4, 8, 64, 1000))
        kind = random.randrange(8)
        if kind < 3:
            data = data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
        elif kind == 3:
            data = data[:at]
        elif kind == 4:
            data = data[:at] + data[at + n :]
        elif kind == 5:
            data = data[: at + n] + data[at:]
        elif kind == 6:
            data = data[:at] + random.choice((b"\0", b"\xff", b"\x7f")) * min(n, len(data) - at) + data[at + n :]
        else:
            data = data[:at] + random.randbytes(n) + data[at:]
    return data


def as_bytes(value: Any) -> bytes:
    """A value as JSON; texts marked `Raw` as they stand, half letters as they come."""
    raws: dict[str, str] = {}

    def marked(each: Any) -> Any:
        if isinstance(each, Raw):
            raws[f"raw-{len(raws)}-"] = str(each)
            return f"raw-{len(raws) - 1}-"
        if isinstance(each, dict):
            return {key: marked(inner) for key, inner in each.items()}
        return [marked(inner) for inner in each] if isinstance(each, list) else each

    text = json.dumps(marked(value))
    for mark, raw in raws.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode("utf-8", "surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key or index) of every value inside one, not those of `Raw` texts."""
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending and len(found) < 5000:
        each = pending.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        found += [(each, key) for key in keys]
        pending += [each[key] for key in keys]
    return found


def _replace(place: Any, key: Any, random: Random) -> None:
    place[key] = odd_value(random)


def _drop(place: Any, key: Any, random: Random) -> None:
    del place[key]


def _bend(place: Any, key: Any, random: Random) -> None:
    """A value near the right one."""
    value = place[key]
    if isinstance(value, bool) or value is None:
        place[key] = random.choice((not value, str(value), 0, 1))
    elif isinstance(value, int | float):
        halves = (float(value), value / 2) if abs(value) < 1e300 else (0.5,)  # a float holds no more
        place[key] = random.choice((value + 1, value - 1, -value, value * 2, str(value), [value], *halves))
    elif isinstance(value, str):
        place[key] = random.choice((value + "x", value[:-1], value.upper(), value * 1000, [value], {value: value}, ""))
    elif isinstance(value, list):
        place[key] = random.choice(
            (value + value, value[:-1], value[::-1], [value], value * 50, dict(enumerate(value)))
        )
    else:
        place[key] = random.choice(([value], {}, list(value), str(value)[:100]))


def _rename(place: Any, key: Any, random: Random) -> None:
    if isinstance(place, dict):
        place[random.choice((*ODD_TEXTS, f"{key}x", str(key).upper(), f"model.{key}"))] = place.pop(key)
    else:
        place.insert(key, odd_value(random))


def _double(place: Any, key: Any, random: Random) -> None:
    """Somebody else's value in this place."""
    other = random.choice(list(place.values()) if isinstance(place, dict) else place)
    place[key] = deepcopy(other)


def _nest(place: Any, key: Any, random: Random) -> None:
    value = place[key]
    for _ in range(random.choice((1, 2, 30, 70))):
        value = random.choice(([value], {"a": value}))
    place[key] = value


_DAMAGES: tuple[Callable[[Any, Any, Random], None], ...] = (
    _replace,
    _replace,
    _bend,
    _bend,
    _drop,
    _rename,
    _double,
    _nest,
)


def _with_a_key_twice(data: bytes, random: Random) -> bytes:
    body = data.strip()
    return b"{" + body[1:-1] + b", " + body[1:-1] + b"}" if body[:1] == b"{" and len(body) > 2 else body + body


_WHOLE: tuple[Callable[[bytes, Random], bytes], ...] = (
    _with_a_key_twice,
    lambda data, random: b"",
    lambda data, random: b"\xef\xbb\xbf" + data,
    lambda data, random: data.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass"),
    lambda data, random: b"[" * 100_000,
    lambda data, random: b"[" + data + b"]",
    lambda data, random: data + data,
    lambda data, random: b'{"a":' * 50_000 + data,
    lambda data, random: data.replace(b'"', b"'"),
    lambda data, random: as_bytes(odd_value(random)),
    lambda data, random: data.replace(b"1", b"1" + b"0" * DIGITS, 1),
)
