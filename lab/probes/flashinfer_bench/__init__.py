"""Measured cards and sweeps in the form of FlashInfer-Bench: definitions, workloads, solutions, traces.

`command` writes the folders, `definitions` says what a card computes, `traces` what was measured. The package
`flashinfer-bench` is not needed; tests read what is written with its own models where it is installed.
"""
