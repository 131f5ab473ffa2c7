"""Measurements, a room each: bench, speed, sweeps, profiles, proofs, gates, ab, kernels, sanitizer.

A probe's `command` reads options and writes rows; its other files measure, judge and draw. They import every other room
but the night, and of that `experiment` alone, which writes a notebook's rows; nothing imports them but the command line
and the notebooks.
"""
