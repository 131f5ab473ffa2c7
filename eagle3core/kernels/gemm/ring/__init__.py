"""The kernel of up to 16 rows of x: `kernel`, W and x copied by its lanes (`lanes`) or W by bulk copies (`bulk`)."""
