"""The first request of a process: what it waits for, and how a machine is made ready for it.

`warm` compiles kernels beforehand; `first_request` makes one request in a process that has just begun, and `measure`
starts such processes and makes rows of what they say. Imports the bench's pairs and the proofs' shapes.
"""
