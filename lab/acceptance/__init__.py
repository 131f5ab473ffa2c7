"""How many drafted tokens the target accepts, and the cause of every miss.

Imports the engine's public names, `rows`, `page`, `pairs` and `parity`.
"""
