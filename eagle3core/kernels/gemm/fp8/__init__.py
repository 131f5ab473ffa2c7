"""W in FP8 (e4m3) for `gemm_ring`: `operands`, what a lane makes of its bytes, and `tiling`, what a launch gets.

The kernels, their order of sums and their epilogues are those of 16-bit W; a scale a row of W joins before the norm's.
"""
