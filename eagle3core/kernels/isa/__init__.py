"""The GPU's instructions as Numba functions, and the small pieces that every kernel is made of.

Imports Numba and nothing of the project but the kernels' door. Another front end would rewrite this room alone.
"""
