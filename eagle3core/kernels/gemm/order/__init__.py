"""Orders in memory in which kernels fetch x and W: `place` of an element of x, `pack` x, `weight` W."""
