"""Weights as the step reads them, a file a format.

Imports kernels (for the order of packing) and checkpoints; a new weight format is a new file here.
"""
