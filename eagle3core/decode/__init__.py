"""State of running sequences and the decode step over it."""
