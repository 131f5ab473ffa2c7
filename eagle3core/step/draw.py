"""Tokens drawn from the target's distribution, by numbers that depend on the request's seed and the position alone.

Every node draws the token after it; the walk of acceptance then follows the drafts that equal what was drawn. A token
is the same whether its position was reached by drafts or without, alone or in company: a request's answer is a function
of its prompt, settings and seed. Temperature, then the k likeliest, then the likeliest up to a mass, then a share of
the likeliest's probability, then typical acceptance leave tokens out; the draw is the first token, by id, whose
cumulative probability among those left exceeds the row's number. Plain torch in every executor, and only in programs
of steps with a request that draws.
Source: sample-and-match, docs/requirements.md R-60 with 1.X-21; inverse-transform sampling; the mixer of Steele, Lea
and Flood, Fast splittable pseudorandom number generators, 2014.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from eagle3core.cache import Copy
from eagle3core.kernels.card import Call
from eagle3core.kernels.choice.sample_kernels import COLDEST
from eagle3core.kernels.isa.by_row import one_up
from eagle3core.sampling import Sampling

# Columns of a slot's settings. A temperature below `COLDEST` is greedy.
TEMPERATURE, TOP_P, MIN_P, EPSILON = range(4)
TOP_K, KEY = range(2)
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd 64-bit constants, signed
_WIDTH = 10  # int32 of a slot's settings; one stays empty, since those before it hold int64
_BITS = 24  # of a number in [0, 1): what fp32 holds exactly


@dataclass(frozen=True)
class DrawSettings:
    """How every slot draws.

    Attributes:
        rows: `[S, 10]` int32, what follows of a slot side by side, so that one copy tells all of it.
    """

    rows: Tensor

    @cached_property
    def shares(self) -> Tensor:
        """`[S, 4]` f32: temperature, top_p, min_p, epsilon."""
        return self.rows[:, :4].view(torch.float32)

    @cached_property
    def counts(self) -> Tensor:
        """`[S, 2]` int64: top_k (0: all) and key."""
        return self.rows[:, 4:8].view(torch.int64)

    @cached_property
    def first(self) -> Tensor:
        """`[S]` int32: the first token of a prompt under reading where it is known, else -1."""
        return self.rows[:, 8]


def new_draw_settings(slots: int, device: torch.device) -> DrawSettings:
    """Greedy settings for every slot."""
    settings = DrawSettings(torch.zeros(slots, _WIDTH, dtype=torch.int32, device=device))
    settings.first.fill_(-1)
    return settings


class GivenDraws:
    """Tells the device how a slot draws, where that is not what was told of it last.

    Args:
        settings: those that `new_draw_settings` gives. copy: enqueues a copy of numbers to a tensor on the device.
    """

    def __init__(self, settings: DrawSettings, copy: Copy) -> None:
        self._rows, self._copy = settings.rows.unbind(0), copy
        self._told: list[tuple[Sampling | None, int | None]] = [(None, None)] * len(self._rows)

    def write(self, slot: int, sampling: Sampling | None, first: int | None = None) -> None:
        """Let a slot draw as a request asks, None: greedily; `first`: its prompt's first token, where it is known."""
        if (sampling, first) == self._told[slot]:
            return
        shares, counts = array("f", [0.0] * 4), array("q", [0, 0])
        if sampling is not None:
            drawn = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.posterior_threshold)
            shares, counts = array("f", drawn), array("q", (sampling.top_k, key_of(sampling.seed)))
        row = b"".join((shares, counts, array("i", (-1 if first is None else first, 0))))
        self._copy(self._rows[slot], memoryview(row).cast("i"))
        self._told[slot] = sampling, first


def mixed(x: Tensor) -> Tensor:
    """int64 numbers that look random, one for each of `x`."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniform(key: Tensor, position: Tensor) -> Tensor:
    """f32 numbers in [0, 1), multiples of 2^-24: the number of `position` under `key`, both int64 of one shape."""
    return _shifted(mixed(key + (position + 1) * _STEP), 64 - _BITS).float() * 2.0**-_BITS


def key_of(seed: int) -> int:
    """The key of a request's seed, an int64."""
    low = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return int(mixed(torch.tensor(low)))


def _shifted(x: Tensor, n: int) -> Tensor:
    """`x` shifted to the right with zeros coming in."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def kept_tokens(logits: Tensor, shares: Tensor, top_k: Tensor) -> Tensor:
    """Probabilities `[R, V]` of the tokens left, 0 of the others; not normalised again.

    Args:
        logits: `[R, V]`. shares: `[R, 4]`, temperatures above 0. top_k: `[R]`, 0 for all.
    """
    wide = one_up(logits.dtype)
    n = logits.shape[1]
    scaled = logits.to(wide) / shares[:, TEMPERATURE, None].to(wide)
    ordered = scaled.sort(dim=1, descending=True, stable=True)
    place = torch.arange(n, device=logits.device)
    # Of equal tokens the lower id comes first, so exactly k are left.
    likely = ordered.values.masked_fill((place >= top_k[:, None]) & (top_k > 0)[:, None], -torch.inf).softmax(dim=1)
    before = likely.cumsum(dim=1) - likely
    is_kept = (before < shares[:, TOP_P, None]) & (likely >= shares[:, MIN_P, None] * likely[:, :1]) & (likely > 0)
    is_kept[:, 0] = True
    left = torch.where(is_kept, likely, 0.0)
    share = left / left.sum(dim=1, keepdim=True)
    entropy = -torch.special.xlogy(share, share).sum(dim=1, keepdim=True)
    epsilon = shares[:, EPSILON, None].to(wide)
    is_typical = share >= torch.minimum(epsilon, epsilon.sqrt() * (-entropy).exp())
    is_typical[:, 0] = True
    return torch.zeros_like(left).scatter(1, ordered.indices, torch.where(is_typical, left, 0.0))


def drawn_tokens(logits: Tensor, shares: Tensor, top_k: Tensor, numbers: Tensor) -> Tensor:
    """`[R]` ids drawn from `logits: [R, V]` by `numbers: [R]` in [0, 1); the rest as in `kept_tokens`."""
    return first_beyond(kept_tokens(logits, shares, top_k), numbers)


def first_beyond(kept: Tensor, numbers: Tensor) -> Tensor:
    """`[R]` ids: the first whose cumulative share of `kept: [R, V]` exceeds `numbers: [R]` in [0, 1)."""
    mass = kept.cumsum(dim=1)
    aim = numbers[:, None].to(mass.dtype) * mass[:, -1:]
    return (mass > aim).int().argmax(dim=1)


def draw(logits: Tensor, positions: Tensor, slots: Tensor, settings: DrawSettings, ids: Tensor, *, ahead: int) -> Call:
    """Replace the greedy choices of rows that draw.

    Args:
        logits: `[R, V]`, -inf where a column is no token.
        positions, ahead: `[R]`, and how far behind them the drawn tokens stand: a token's number is its position's.
        slots: `[B]` whose rows they are, R / B each, -1 for dead ones.
        ids: `[R]` greedy choices; rows of greedy slots, dead rows and rows without a choice are left as they are.
    """
    operands = {"logits": logits, "positions": positions, "slots": slots, "ids": ids, "ahead": ahead,
                "shares": settings.shares, "counts": settings.counts}  # fmt: skip
    return Call("draw", operands, partial(_draw, logits, positions, slots, settings, ids, ahead))


def keep_known(settings: DrawSettings, slots: Tensor, ids: Tensor) -> Call:
    """Put known first tokens of prompts in the place of drawn ones: `slots, ids: [n]`, -1 for none; ids of -1 stay."""
    operands = {"first": settings.first, "slots": slots, "ids": ids}
    return Call("keep_known", operands, partial(_keep_known, settings.first, slots, ids))


def _keep_known(first: Tensor, slots: Tensor, ids: Tensor) -> None:
    known = first[slots.clamp_min(0).long()]
    ids.copy_(known.where((known >= 0) & (slots >= 0) & (ids >= 0), ids))


def _draw(logits: Tensor, positions: Tensor, slots: Tensor, settings: DrawSettings, ids: Tensor, ahead: int) -> None:
    each = len(ids) // len(slots)
    row = slots.clamp_min(0).long().repeat_interleave(each)
    shares, counts = settings.shares[row], settings.counts[row]
    draws = (shares[:, TEMPERATURE] >= COLDEST) & (slots >= 0).repeat_interleave(each) & (ids >= 0)
    shares = shares.clone()
    shares[:, TEMPERATURE] = shares[:, TEMPERATURE].where(draws, 1.0)
    numbers = uniform(counts[:, KEY], positions.long() + ahead)
    drawn = drawn_tokens(logits.where(draws[:, None], 0.0), shares, counts[:, TOP_K], numbers)
    ids.copy_(drawn.to(ids.dtype).where(draws, ids))
