"""The kernels as the lab sees them: measured rows, proofs on the CPU, machine code by architecture, pictures."""
