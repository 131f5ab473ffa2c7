"""A night's jobs: planned, run one notebook a process, remembered. The night itself is `lab.nightly`.

Imports `errors`, `options`, `rows`, `figures` and `pairs`. A new notebook needs nothing here.
"""
