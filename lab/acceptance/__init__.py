"""How many drafted tokens the target accepts, and the cause of every miss.

Imports the engine's public names, `options`, `rows`, `figures`, `pairs` and `parity`.
"""
