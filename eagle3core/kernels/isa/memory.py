"""PTX instructions that load and store, global memory by address and shared memory by offset; part of `ptx`.

Source: PTX ISA 9.0, the instruction named in each text.
"""

from __future__ import annotations

from eagle3core.kernels.isa.instruction import f32, i32, i64, instruction

# ---- global loads; `_const` may bypass coherence (data no kernel writes), `_stream` spares L1 too, `_l2` skips L1
load_u16 = instruction(
    "load_u16", "{ .reg .b16 half; ld.global.b16 half, [$1]; cvt.u32.u16 $0, half; }", [i32], [i64], volatile=True
)
load_u32 = instruction("load_u32", "ld.global.u32 $0, [$1];", [i32], [i64], volatile=True)
load_u64 = instruction("load_u64", "ld.global.u64 $0, [$1];", [i64], [i64], volatile=True)
load_u32x4 = instruction("load_u32x4", "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", [i32] * 4, [i64], volatile=True)
load_u32x4_const = instruction(
    "load_u32x4_const", "ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];", [i32] * 4, [i64], volatile=True
)
load_u32x4_stream = instruction(
    "load_u32x4_stream",
    "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0,$1,$2,$3}, [$4];",
    [i32] * 4,
    [i64],
    volatile=True,
)
load_u32x4_l2 = instruction(
    "load_u32x4_l2", "ld.global.cg.v4.u32 {$0,$1,$2,$3}, [$4];", [i32] * 4, [i64], volatile=True
)
load_f32 = instruction("load_f32", "ld.global.f32 $0, [$1];", [f32], [i64], volatile=True)
load_u32x2 = instruction("load_u32x2", "ld.global.v2.u32 {$0,$1}, [$2];", [i32] * 2, [i64], volatile=True)
load_f32x2 = instruction("load_f32x2", "ld.global.v2.f32 {$0,$1}, [$2];", [f32] * 2, [i64], volatile=True)
load_f32x4 = instruction("load_f32x4", "ld.global.v4.f32 {$0,$1,$2,$3}, [$4];", [f32] * 4, [i64], volatile=True)
load_f32_l2 = instruction("load_f32_l2", "ld.global.cg.f32 $0, [$1];", [f32], [i64], memory=True)
load_f32x4_l2 = instruction("load_f32x4_l2", "ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4];", [f32] * 4, [i64], memory=True)

# ---- global stores
store_u8 = instruction("store_u8", "st.global.b8 [$0], $1;", takes=[i64, i32], memory=True)
store_u16 = instruction(
    "store_u16", "{ .reg .b16 half; cvt.u16.u32 half, $1; st.global.b16 [$0], half; }", takes=[i64, i32], memory=True
)
store_u32 = instruction("store_u32", "st.global.u32 [$0], $1;", takes=[i64, i32], memory=True)
store_u64 = instruction("store_u64", "st.global.u64 [$0], $1;", takes=[i64, i64], memory=True)
store_u32x2 = instruction("store_u32x2", "st.global.v2.u32 [$0], {$1,$2};", takes=[i64] + [i32] * 2, memory=True)
store_u32x4 = instruction("store_u32x4", "st.global.v4.u32 [$0], {$1,$2,$3,$4};", takes=[i64] + [i32] * 4, memory=True)
# The same where an index is below an end, in place of a branch around it: (address, value, index, end).
store_u32_below = instruction(
    "store_u32_below",
    "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p st.global.u32 [$0], $1; }",
    takes=[i64, i32, i32, i32],
    memory=True,
)
store_u32x2_below = instruction(
    "store_u32x2_below",
    "{ .reg .pred p; setp.lt.s32 p, $3, $4; @p st.global.v2.u32 [$0], {$1,$2}; }",
    takes=[i64, i32, i32, i32, i32],
    memory=True,
)
# Two such stores, (address, value, address, value, index, end), by a predicate each: one for both becomes
# a branch.
store_u32_twice_below = instruction(
    "store_u32_twice_below",
    "{ .reg .pred p, q; .reg .s32 next; add.s32 next, $4, 1; setp.lt.s32 p, $4, $5; setp.le.s32 q, next, $5;"
    " @p st.global.u32 [$0], $1; @q st.global.u32 [$2], $3; }",
    takes=[i64, i32, i64, i32, i32, i32],
    memory=True,
)
store_f32 = instruction("store_f32", "st.global.f32 [$0], $1;", takes=[i64, f32], memory=True)
store_f32x2 = instruction("store_f32x2", "st.global.v2.f32 [$0], {$1,$2};", takes=[i64] + [f32] * 2, memory=True)
store_f32x4 = instruction("store_f32x4", "st.global.v4.f32 [$0], {$1,$2,$3,$4};", takes=[i64] + [f32] * 4, memory=True)

# address_after(address, pitch, count): the address `count` pitches further. As a product and a sum, of which only the
# sum changes with the address, the compiler would keep the products of all counts in registers.
address_after = instruction("address_after", "mad.wide.s32 $0, $2, $3, $1;", [i64], [i64, i32, i32])

# ---- shared memory, by the addresses that `shared_address` gives
shared_load_u32 = instruction("shared_load_u32", "ld.shared.u32 $0, [$1];", [i32], [i32], memory=True)
shared_load_u32x2 = instruction("shared_load_u32x2", "ld.shared.v2.u32 {$0,$1}, [$2];", [i32] * 2, [i32], memory=True)
shared_load_u32x4 = instruction(
    "shared_load_u32x4", "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", [i32] * 4, [i32], memory=True
)
shared_load_f32 = instruction("shared_load_f32", "ld.shared.f32 $0, [$1];", [f32], [i32], memory=True)
shared_load_f32x4 = instruction(
    "shared_load_f32x4", "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", [f32] * 4, [i32], memory=True
)
shared_store_u32 = instruction("shared_store_u32", "st.shared.u32 [$0], $1;", takes=[i32, i32], memory=True)
shared_store_u32x4 = instruction(
    "shared_store_u32x4", "st.shared.v4.u32 [$0], {$1,$2,$3,$4};", takes=[i32] * 5, memory=True
)
shared_store_f32 = instruction("shared_store_f32", "st.shared.f32 [$0], $1;", takes=[i32, f32], memory=True)
shared_store_f32x2 = instruction(
    "shared_store_f32x2", "st.shared.v2.f32 [$0], {$1,$2};", takes=[i32] + [f32] * 2, memory=True
)
shared_store_f32x4 = instruction(
    "shared_store_f32x4", "st.shared.v4.f32 [$0], {$1,$2,$3,$4};", takes=[i32] + [f32] * 4, memory=True
)
