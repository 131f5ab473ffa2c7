"""Experts of a target: what a config says of them, and the names and shapes that they are stored under.

Imports `settings` and `tensors` of the room around it. Another way of choosing experts is a function in `choice`,
another way of storing them a branch in `names`.
"""
