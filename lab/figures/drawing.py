"""A drawn figure with what travels with it: its words, and the table it was drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class Drawing(NamedTuple):
    """What a function that draws gives back; a notebook passes it on as it is.

    Attributes:
        fig: open, until it is kept. table: the numbers it was drawn from.
        alt: what it shows, for who cannot see it.
        caption: how it was measured, and how to read it.
        steps: as of `Kept`.
    """

    fig: Figure
    table: DataFrame
    alt: str
    caption: str
    steps: tuple[str, ...] = ()
