"""The order of the bits of four-bit values (E2M1) in a word that `WIDEN_E2M1_BF16` takes apart.

A word holds eight values, of four pairs: what is opened into a word's lower half (an even value) and its upper (odd).
In bf16 a value's sign is bit 15 of its half, its exponent bits 8 and 7, its fraction bit 6. A pair's bits lie so that
one rotation of the word brings all of them there at once, and that of the first pair is none; the last pair, which has
what is left, takes two shifts. So nine instructions take a word apart. Of all orders with one or two rotations a value
none has fewer, and of those with nine this has as few rotations that are no plain shifts as any: one.

Source: derived here; OCP Microscaling Formats specification 1.0, section 5.3.3.
"""

from __future__ import annotations

# Of every pair's even value: the bits of its fraction, of its exponent from the lower one on, and of its sign. Those of
# its odd value are 16 further, modulo 32.
EVEN = ((6, 7, 8, 15), (2, 3, 4, 11), (28, 29, 30, 5), (0, 1, 10, 9))
PLACES = tuple(tuple(tuple((at + 16 * odd) % 32 for at in bits) for odd in range(2)) for bits in EVEN)
POWER_BIAS = 126  # an exponent byte of bf16 times 2^126, which E2M1 at the low end of bf16's exponents lacks
