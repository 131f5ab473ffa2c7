"""What a kernel can do before it waits for the one before: work out where its first loads go.

Left to itself the compiler puts address arithmetic, and the first read of the parameters, where the address is used,
which is after the wait: then a kernel starts with what could have been done while it was idle. Source: derived here,
from machine code; what it saves is in docs/log.md.
"""

from __future__ import annotations

from typing import Any


def make_early(isa: Any, threads: int) -> Any:
    """`early(value)`: `value`, an address or a mix of some, is known from here on, in a block of `threads`.

    It is stored where nothing reads it, which no compiler moves across a wait. A few cycles, and 4 bytes a thread.
    """
    i32 = isa.i32

    def early(value: Any) -> None:
        unread = isa.shared_address(isa.cuda.shared.array(threads, i32))
        isa.shared_store_u32(unread + i32(isa.cuda.threadIdx.x) * 4, i32(value & 0x7FFFFFFF))

    return isa.inlined(early)
