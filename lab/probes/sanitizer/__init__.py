"""The kernels under compute-sanitizer: every card clean, every planted fault found.

`command` starts the tool; `run` is what runs under it; `plants` are the faults; `report` reads what the tool said.
"""
