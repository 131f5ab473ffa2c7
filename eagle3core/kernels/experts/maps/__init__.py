"""Kernels of the experts' maps: read `walk` first, then `order` in memory, and `form`, how a launch is cut."""
