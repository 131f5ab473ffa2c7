"""Figures that read well on a light page, a dark page, paper, and aloud.

A figure is an inline SVG whose text stays text, whose ink is the page's own text colour, whose series take colours from
CSS variables with a light and a dark value, plus its alternative text, its caption and the table it was drawn from.
Series differ by marker and dash as well as by colour, so hue is never the only carrier.
"""

from lab.figures.drawing import Drawing
from lab.figures.kept import MOST_STEPS, Kept, show
from lab.figures.looks import (
    DASHES,
    FAINT,
    HATCHES,
    INK,
    MARKERS,
    MEANINGS,
    SERIES,
    banner,
    colour_css,
    colour_of,
    depth_look,
    look_of,
    notebook_style,
    use_style,
)
from lab.figures.svg import standalone, to_svg
from lab.figures.tables import shown, table_cells, table_html
from lab.figures.token_markup import tokens_html
from lab.figures.token_view import MOST_VIEWS, TOKEN_VIEW, TokenView

__all__ = [
    "DASHES",
    "FAINT",
    "HATCHES",
    "INK",
    "MARKERS",
    "MEANINGS",
    "MOST_STEPS",
    "MOST_VIEWS",
    "SERIES",
    "TOKEN_VIEW",
    "Drawing",
    "Kept",
    "TokenView",
    "banner",
    "colour_css",
    "colour_of",
    "depth_look",
    "look_of",
    "notebook_style",
    "show",
    "shown",
    "standalone",
    "table_cells",
    "table_html",
    "to_svg",
    "tokens_html",
    "use_style",
]
