"""What people look at: the report of a run, the index of all runs.

Imports `rows`, `figures` and `night`; draws from stored rows alone, with no torch.
"""
