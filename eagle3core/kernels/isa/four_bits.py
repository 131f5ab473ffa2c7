"""The order of the bits of four-bit values (E2M1) in a word that `WIDEN_E2M1_BF16` takes apart.

A word holds eight values, of four pairs: even ones in its lower half, odd ones in its upper. In a half, pair i has its
exponent and fraction in bits 3i to 3i + 2 and its sign in bit `SIGNS[i]`: so two of the four signs are moved by the
shift of their own value, or by none, and eleven instructions take a word apart. No order has fewer (all were tried).

Source: derived here; OCP Microscaling Formats specification 1.0, section 5.3.3.
"""

SIGNS = (13, 12, 15, 14)
POWER_BIAS = 126  # an exponent byte of bf16 times 2^126, which E2M1 at the low end of bf16's exponents lacks
