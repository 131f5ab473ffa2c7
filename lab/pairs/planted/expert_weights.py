"""What a planted target with experts has beside a dense one: codes for its routers, the routers, maps in 4 bits.

The first values of the residual stream are the routers'. A token's embedding holds the token's code there, no layer
adds to them, and routers read them alone: every logit is the code's times one positive number, the row's 1 / rms. So a
token's experts are those of its code whatever the context, bit for bit; codes are random, so that tokens of different
codes take experts at random, any alike likely, in every layer others.

Derived here; bytes of MXFP4 as `eagle3core.kernels.experts` reads them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MOST_CODE, OF_HIDDEN = 64, 8  # width of a code: at most 64 values, and an eighth of the stream
ROUTER_RMS = 2.0  # of logits: shares of a row are then as uneven as 1 to 10, about
E2M1_MEAN_SQUARE = 8.5625  # of the 16 values of 4 bits: 2 * (0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 16
BIAS = 127  # a scale s stands for 2^(s - 127)


def code_width(hidden: int) -> int:
    """Values of the stream of width `hidden` that are the routers'."""
    return min(MOST_CODE, hidden // OF_HIDDEN)


def with_codes(table: Tensor, codes: Tensor, holder: Tensor) -> Tensor:
    """`table: [V, E]` in place, every token with the code of a token.

    Args:
        codes: `[V, R]`, one a token. holder: `[V]` int64, the token whose code each has.
    """
    table[:, : codes.shape[1]] = codes[holder]
    return table


def router_rows(weight: Tensor) -> Tensor:
    """`weight: [X, E]` of standard normal values in place: rows that read codes alone, all equally long."""
    read = weight[:, : code_width(weight.shape[1])].float()
    rows = ROUTER_RMS * read / read.norm(dim=1, keepdim=True)
    weight.zero_()[:, : rows.shape[1]] = rows
    return weight


def spare_codes(written: Tensor, dim: int, width: int) -> Tensor:
    """`written` in place, with noughts where it would add to codes along `dim`."""
    written.narrow(dim, 0, width).zero_()
    return written


def random_blocks(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Bytes of any two values of 4 bits."""
    return torch.empty(shape, dtype=torch.uint8, device=random.device).random_(0, 256, generator=random)


def random_scales(shape: tuple[int, ...], spread: float, random: torch.Generator) -> Tensor:
    """Two neighbouring powers of two, in such shares that the values' mean square is `spread` squared."""
    wanted = spread * spread / E2M1_MEAN_SQUARE  # mean of the scales' squares
    lower = math.floor(math.log2(wanted) / 2)
    upper_share = (wanted / 4.0**lower - 1) / 3
    drawn = random_blocks(shape, random)  # bytes, since what takes 2 GB may take as much again while it is made
    return (drawn < round(256 * upper_share)).to(torch.uint8).add_(lower + BIAS)
