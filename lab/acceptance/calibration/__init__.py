"""What formats of a target's weights do to what it says: held-out loss and top-1 agreement, format by format.

Imports the engine's face, prompts and figures; the night's notebooks import it. A format that engines learn is an entry
of `FORMATS` in `measure`.
"""
