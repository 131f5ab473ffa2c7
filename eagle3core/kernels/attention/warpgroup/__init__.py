"""Attention for sm_90a by warpgroups: four warps multiply together what another warp fetches.

Read `group` first, the kernel, then `stages` (sets in shared memory, and their products), `careful` (a set unit by
unit), `sums` with `held` (what streams of a split add up to) and `shared` (where it all lies). `attention.plan` and
`attention.variant` alone import this. The order of sums is that of `attention.layout`, and the bits are those of
`attention.rows`: change how warps wait and fetch, not what is added to what.
"""
