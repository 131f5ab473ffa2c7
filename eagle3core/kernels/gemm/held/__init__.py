"""`gemm_held`: blocks whose warpgroups hold all totals; `shares` cuts work into runs of streams for them."""
