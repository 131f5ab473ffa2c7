"""Performance mode: the seven promises of a run, and what watches that they hold.

Imports the step below it; the engine imports it. A new promise is an entry of `invariants` and a check in `mode`.
"""
