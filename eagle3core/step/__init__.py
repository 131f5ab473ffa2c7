"""The decode step: its state, its program, and the ways to run it.

Imports kernels, weights and geometry; knows no request and no engine. `build` reads as the table of contents of a step.
"""
