"""Rows: the lab's only record of a number, what it was measured on, and what may be said when two of them differ.

Imports `errors` and `options` alone; every room above those imports this one.
"""
