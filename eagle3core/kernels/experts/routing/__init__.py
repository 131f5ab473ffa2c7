"""Kernels of the router: `score` makes logits, `choose` takes the largest of them and lists who goes where."""
