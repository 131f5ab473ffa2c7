"""Keys and values as the cache keeps them: in the compute dtype, or in e4m3 by a scale.

An entry in e4m3 is the nearest value of x / scale, ties to even; what is larger than 448 becomes 448, a NaN stays one.
The scales are constants of a layer, one for keys and one for values, so what is kept of a token depends on that token
alone. Launches take 1 / scale in fp32, which x is multiplied by; attention multiplies by the scale.

Source: e4m3 after Micikevicius et al., arXiv 2209.05433; a scale a layer as ModelOpt and compressed-tensors store it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3core.kernels.card import E4M3

LARGEST = torch.finfo(E4M3).max  # 448


def write_cache_rows(pages: Tensor, slots: Tensor, rows: Tensor, factor: Tensor | None = None) -> None:
    """`rows: [n, K, D]` of keys or of values to their places in `pages: [n_blocks, K, block, D]`.

    Args:
        slots: `[n]` block * block size + offset; rows with a negative one are not kept.
        factor: of a cache in e4m3: 1 / scale, one fp32.
    """
    held, block = slots >= 0, pages.shape[2]
    slot, kept = slots[held].long(), rows[held]
    if pages.dtype == E4M3:
        assert factor is not None, "a cache in e4m3 has scales"
        kept = (kept * factor).clamp(-LARGEST, LARGEST)
    pages[slot // block, :, slot % block] = kept.to(pages.dtype)


def make_to_e4m3(isa: Any) -> Any:
    """Inlined `to_e4m3(x, factor)`: the byte of x * factor, in an int32.

    In integers and not by an instruction: sm_80 has none, and these are few values.
    """
    i32 = isa.i32
    # Beside 2^14 a sum's last bit is worth 2^-9, the unit of subnormal values: the addition rounds as they want.
    largest, least_normal, shift = np.float32(LARGEST), np.float32(2.0**-6), np.float32(2.0**14)
    nan = 0x7F

    def to_e4m3(x: Any, factor: Any) -> Any:
        scaled = isa.product(x, factor)
        bits = isa.bits_of_f32(scaled)
        sign, size = i32((bits >> 24) & 0x80), isa.f32_of_bits(i32(bits & 0x7FFFFFFF))
        code = i32(nan)
        if size == size:
            size = isa.minimum(size, largest)
            if size < least_normal:
                code = i32(isa.bits_of_f32(size + shift) & 0xF)
            else:
                # Three bits of the fraction stay; half of the last one, and one more before an odd one, carries.
                own = isa.bits_of_f32(size)
                code = i32(i32(own + 0x7FFFF + ((own >> 20) & 1)) >> 20) - (120 << 3)
        return i32(i32(code) | sign)

    return isa.inlined(to_e4m3)
