"""Matrix products where layers follow each other: those of the target's pass alone, beside torch's in the same order.

`passes` finds them in an engine's programs; `command` times them; `rows` reads and judges what it wrote.
"""
