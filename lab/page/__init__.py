"""What people look at: figures, the report of a run, the index of all runs.

Imports `rows` and `night`; draws from stored rows alone, with no torch.
"""
