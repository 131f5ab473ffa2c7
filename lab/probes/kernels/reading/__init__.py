"""How fast this GPU reads its memory in this run: kernels that only read, and the best rate that sums prove.

`lanes` reads by loads of the lanes, `bulk` by bulk copies into deep rings; `ceiling` times the latter, as it is
measured beside steps. A further way to read is a file with a kernel here and its settings in `ceiling`.
"""
