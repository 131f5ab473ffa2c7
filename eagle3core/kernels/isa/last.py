"""Which block of several is the last to come to a point: it goes on with what all of them have written.

A launch of one kernel in place of two, where few blocks make what one reads. Source: PTX ISA 9.0, memory consistency
model; the pattern is that of CUDA's sample threadFenceReduction.
"""

from __future__ import annotations

from typing import Any


def make_is_last(isa: Any) -> Any:
    """`is_last(counter, n, tid)`: whether this block is the last of `n` to come, in all of its threads.

    What the n blocks wrote before, this one's threads may then read. The word at `counter` is 0 before and after.
    """
    cuda, i32 = isa.cuda, isa.i32

    def is_last(counter: Any, n: Any, tid: Any) -> Any:
        answer = isa.shared_address(cuda.shared.array(1, i32))
        # Every thread's stores are ordered before the barrier, the barrier before the count of thread 0.
        cuda.syncthreads()
        if n == 1:
            return i32(1)
        if tid == 0:
            arrived = isa.atomic_add_i32(counter, i32(1))
            if arrived == n - 1:
                isa.store_u32(counter, i32(0))  # ready for the next launch
            isa.shared_store_u32(answer, i32(arrived == n - 1))
        cuda.syncthreads()
        return isa.shared_load_u32(answer)

    return isa.inlined(is_last)
