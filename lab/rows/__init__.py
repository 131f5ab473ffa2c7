"""Rows: the lab's only record of a number, what it was measured on, and what may be said when two of them differ.

Imports nothing of the lab but its errors; every other room imports this one.
"""
