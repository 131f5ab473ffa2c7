"""PTX statements of conversions by a small interpreter, so that their text is held to what its twin computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

KINDS = {"bf16": torch.bfloat16, "f16": torch.float16}


def two_of(word: int, kind: str) -> list[float]:
    """The values of both halves of a word, the lower first."""
    halves = torch.tensor([word & 0xFFFF, word >> 16 & 0xFFFF], dtype=torch.int32).to(torch.uint16)
    return halves.view(KINDS[kind]).double().tolist()


def computed(statement: str, given: Mapping[str, int], kind: str) -> list[int]:
    """What the PTX of a conversion makes of its operands; knows the few instructions that conversions have."""
    at = dict(given)

    def value(name: str) -> int:
        return at[name] if name in at else int(name, 0)

    def products(a: int, b: int, c: int) -> int:
        rows = [torch.tensor(two_of(word, kind), dtype=torch.float64) for word in (a, b, c)]
        bits = (rows[0] * rows[1] + rows[2]).to(KINDS[kind]).view(torch.int16).int() & 0xFFFF
        return int(bits[1]) << 16 | int(bits[0])

    def chosen(a: int, b: int, c: int, table: int) -> int:
        places = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
        return sum((table >> place & 1) << i for i, place in enumerate(places))

    def bytes_of(a: int, b: int, selector: int) -> int:
        whole = (a | b << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(whole[selector >> i & 7] for i in (0, 4, 8, 12)), "little")

    act: dict[str, Callable[..., int]] = {
        "and": lambda a, b: a & b, "shr": lambda a, n: a >> n, "shl": lambda a, n: (a << n) & 0xFFFFFFFF,
        "shf": lambda low, high, n: ((high << 32 | low) << n) >> 32 & 0xFFFFFFFF,  # to the left, wrapped
        "mov": lambda a: a, "lop3": chosen, "fma": products, "prmt": bytes_of,
    }  # fmt: skip
    for line in statement.strip("{ }").split(";"):
        words = re.findall(r"[$\w.]+", line)
        if words[:1] == ["mov.b32"] and len(words) == 4:  # a word in two halves, or of two
            if line.strip().startswith("mov.b32 {"):
                at[words[1]], at[words[2]] = value(words[3]) & 0xFFFF, value(words[3]) >> 16
            else:
                at[words[1]] = value(words[3]) << 16 | value(words[2])
        elif words and words[0] != ".reg":
            at[words[1]] = act[words[0].split(".")[0]](*(value(word) for word in words[2:]))
    return [at[name] for name in sorted(at) if name.startswith("$") and name not in given]
