"""What tensors say without a forward pass: noise or trained, alike or not, rounded, rotated.

Independent values of one spread, whatever their distribution, have a largest singular value at the edge of the
Marchenko-Pastur law, spread * (sqrt(rows) + sqrt(columns)); rows that were trained share directions and lie far above
it (the shipped head 2.7 times). Source: Marchenko and Pastur (1967); the use and its bounds are derived here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

MOST_ROWS, MOST_COLUMNS = 1024, 512  # looked at, evenly spaced: a fraction of a second at any size
NOISE = (0.8, 1.2)  # of the edge: no trained table of the pairs at hand lies below 1.5, no random one outside
MOST_LEVELS = 16  # values in a slice of weights that were rounded to 4 bits
SLICE = 32
LEAST_UNLIKE = 0.02  # of a table's rows, from which those unlike the target's are no single tokens
ROWS_AT_ONCE = 8192  # in fp32: 128 MiB at 4096 columns


def sample(tensor: Tensor) -> Tensor:
    """Evenly spaced rows and columns of `[R, C]`, fp32 on the CPU."""
    rows, columns = (_spaced(n, most) for n, most in zip(tensor.shape, (MOST_ROWS, MOST_COLUMNS), strict=True))
    return tensor[rows.to(tensor.device)].float().cpu()[:, columns]


def edge_ratio(table: Tensor) -> float:
    """Largest singular value of a part of `[R, C]` over what noise of the same spread has; 0 for a constant table."""
    part = sample(table)
    spread = float(part.std())
    if not spread:
        return 0.0
    edge = spread * (math.sqrt(part.shape[0]) + math.sqrt(part.shape[1]))
    return float(torch.linalg.matrix_norm(part, ord=2)) / edge


def is_noise(table: Tensor) -> bool:
    """Whether a table looks like independent random values."""
    return NOISE[0] < edge_ratio(table) < NOISE[1]


def zero_rows(table: Tensor) -> float:
    """Share of rows that hold nothing but zeros."""
    return float((table == 0).all(dim=1).double().mean())


def row_cosine(first: Tensor, second: Tensor) -> float:
    """Mean cosine of row and row, of evenly spaced ones of two `[R, C]`."""
    rows = _spaced(len(first), MOST_ROWS).to(first.device)
    return float(functional.cosine_similarity(first[rows].float(), second[rows].float()).mean())


def unlike_rows(first: Tensor, second: Tensor, least: float) -> Tensor:
    """`[R]` bool: rows of one `[R, C]` whose cosine to the other's is below `least`, those aside that are zeros there.

    Where few of evenly spaced rows are, the others are not looked at, and all are False: no part was left unfilled.
    """
    some = _spaced(len(first), MOST_ROWS)
    if not bool(_are_unlike(first[some], second[some], least).double().mean() > LEAST_UNLIKE):
        return torch.zeros(len(first), dtype=torch.bool)
    parts = zip(torch.split(first, ROWS_AT_ONCE), torch.split(second, ROWS_AT_ONCE), strict=True)
    return torch.cat([_are_unlike(own, other, least).cpu() for own, other in parts])


def _are_unlike(own: Tensor, other: Tensor, least: float) -> Tensor:
    alike = functional.cosine_similarity(own.float(), other.float())
    return (alike < least) & (other != 0).any(dim=1)


def levels_a_slice(matrix: Tensor) -> float:
    """Mean count of different values among 32 neighbours of a row: 17 and less where weights hold 4 bits each."""
    n = matrix.shape[1] // SLICE
    rows = matrix[_spaced(len(matrix), 64).to(matrix.device)][:, : n * SLICE].float().reshape(-1, SLICE)
    ordered = rows.sort(dim=1).values
    return float((1 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)).double().mean()) if n else float(SLICE)


def rotation_between(first: Tensor, second: Tensor) -> tuple[Tensor, float]:
    """The orthogonal `[C, C]` that turns rows of one `[R, C]` into those of another, and the mean cosine it gives.

    The cosine is of odd rows with a rotation fitted on even ones, so that it says how much of it is no coincidence.
    """
    # Rows of one length: training makes the rows of frequent tokens long, and moves those furthest.
    first, second = functional.normalize(first.double()), functional.normalize(second.double())
    fitted = polar(first[::2].T @ second[::2])
    return polar(first.T @ second).float(), row_cosine(first[1::2] @ fitted, second[1::2])


def polar(matrix: Tensor) -> Tensor:
    """The orthogonal factor: the rotation nearest to a square matrix (Schoenemann 1966)."""
    u, _, v = torch.linalg.svd(matrix)
    nearest: Tensor = u @ v
    return nearest


def _spaced(n: int, most: int) -> Tensor:
    return torch.arange(n) if n <= most else torch.linspace(0, n - 1, most).long()
