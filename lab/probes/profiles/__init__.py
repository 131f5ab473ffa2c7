"""Profiles of decode steps: what each NVTX range costs, asks of the GPU, and moves (docs/measuring.md).

`command` takes a capture (Nsight Systems, Nsight Compute, or torch's profiler) or reads a stored one; `ranges` sums it
up by range; `rows` keeps it; notebook 50_profile draws it, with or without a GPU.
"""
