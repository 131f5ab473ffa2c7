"""Sweeps: order-neutral settings timed against each other, and the certainly better ones kept in a data file.

`regimes` says what is timed, `measure` times it into `rows`, `choose` decides, `bake` writes what the kernels look up.
"""
