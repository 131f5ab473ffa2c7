"""Measurements, a room each: bench, speed, sweeps, profiles, proofs, gates, ab, kernels, sanitizer.

A probe's `command` reads options and writes rows; its other files measure, judge and draw. They import every room above
the night; nothing imports them but the command line and the notebooks.
"""
