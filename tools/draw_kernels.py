"""Draws the four pictures of docs/kernels.md: python3 tools/draw_kernels.py [FOLDER]

Numbers in them come from the kernels' own constants; each picture is an SVG of its own for light and dark pages.
"""

from __future__ import annotations

import html
import sys
import textwrap
from pathlib import Path

from eagle3core.kernels.attention.launcher import order_of
from eagle3core.kernels.attention.layout import UNIT as KEYS
from eagle3core.kernels.gemm.products import FRAGMENT, STREAMS, UNIT
from lab.figures import SERIES, standalone

LINE = 18  # from one line of text to the next


class Drawing:
    """Boxes, words and arrows on a page of `width` x `height`."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts: list[str] = []
        self.head = f'<svg viewBox="0 0 {width} {height}" fill="currentColor" font-size="13" role="img">'
        self.parts.append(f"<title>{html.escape(title)}</title>")
        self.text(8, 20, title, size=15, bold=True)

    def text(self, x: float, y: float, words: str, *, size: int = 13, bold: bool = False, middle: bool = False) -> None:
        """Words from `x` on, or around it; a line each."""
        look = f'font-size="{size}"' + (' font-weight="bold"' if bold else "")
        look += ' text-anchor="middle"' if middle else ""
        for number, line in enumerate(words.split("\n")):
            self.parts.append(f'<text x="{x}" y="{y + number * LINE}" {look}>{html.escape(line)}</text>')

    def paragraph(self, x: float, y: float, words: str, *, width: int = 112) -> None:
        """Words in lines of at most `width` letters."""
        self.text(x, y, textwrap.fill(" ".join(words.split()), width))

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", *, series: int = 0, size: int = 12
    ) -> None:
        """A box with words in its middle; `series` 1.. colours it, 0 leaves it plain."""
        fill = f"var(--series-{series}, {SERIES[series - 1][0]})" if series else "none"
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{fill}" fill-opacity="0.28" '
            'stroke="currentColor" stroke-width="0.8"/>'
        )
        lines = words.split("\n")
        for number, line in enumerate(lines if words else []):
            middle = y + height / 2 + 4 + (number - (len(lines) - 1) / 2) * (size + 2)
            self.text(x + width / 2, middle, line, size=size, middle=True)

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A line from one point to another, with a dot at its end."""
        self.parts.append(
            f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="currentColor" stroke-width="1"/>'
            f'<circle cx="{x1}" cy="{y1}" r="3"/>'
        )

    def save(self, path: Path) -> None:
        """Writes the SVG file."""
        path.write_text(standalone(f"{self.head}{''.join(self.parts)}</svg>"), encoding="utf-8")


def gemm_layout() -> Drawing:
    """One unit of a tile of W: who copies what, and which operands it becomes."""
    page = Drawing(760, 400, f"GEMM: 16 rows of W by {UNIT} k, as copied and as multiplied")
    page.text(20, 50, "a fragment: 8 rows by 32 k, 512 bytes; one 16-byte piece a lane")
    for row in range(8):
        page.text(14, 76 + row * 24, f"r{row}", size=11)
        for t in range(4):
            page.box(40 + t * 88, 60 + row * 24, 88, 24, f"lane {4 * row + t}", series=t + 1, size=11)
    for t in range(4):
        page.text(84 + t * 88, 268, f"k {8 * t}..{8 * t + 7}", size=11, middle=True)
    page.text(430, 50, "what lane (g, t) multiplies: its own pieces")
    page.box(430, 60, 300, 26, "a0 a1 a2 a3: row g, k 8t .. 8t+7", series=1)
    page.box(430, 90, 300, 26, "b0 b1 b2 b3: the pair's other row", series=2)
    page.box(430, 120, 300, 26, "x0 x1 x2 x3: row g of x, the same k", series=3)
    page.text(430, 176, "mma 1 sums k 8t .. 8t+3 of all four t:", bold=True)
    page.text(446, 176 + LINE, "rows (a0, b0, a1, b1) times (x0, x1)")
    page.text(430, 226, "mma 2 sums k 8t+4 .. 8t+7:", bold=True)
    page.text(446, 226 + LINE, "rows (a2, b2, a3, b3) times (x2, x3)")
    page.paragraph(
        20,
        300,
        f"""The instruction wants k 2t, 2t+1, 2t+8, 2t+9 from lane t; which k they are does not matter to a sum, as
        long as W and x agree. So each lane reads back only what it copied itself: no ldmatrix, no transposition, and
        no barrier in the ring's loop. Packed at load, the two fragments of a unit lie side by side: {2 * FRAGMENT}
        bytes, in lane order, units one after the other. Pairs are rows r and r + 8; gate and up for SwiGLU; r and
        r + half a head for rotary embeddings.""",
    )
    return page


def gemm_order() -> Drawing:
    """The order in which one result is summed, and who does it in either kernel."""
    page = Drawing(760, 372, "GEMM: one order of summation, two kernels")
    page.text(20, 50, f"K, cut into units of {UNIT}, in {STREAMS} contiguous streams")
    for s in range(STREAMS):
        for u in range(6):
            page.box(20 + s * 180 + u * 29, 60, 29, 26, series=s + 1)
        page.text(20 + s * 180 + 87, 104, f"s{s}: units ascending", size=12, middle=True)
    page.box(20, 124, 350, 92, series=0)
    page.text(32, 144, "gemm_ring, up to 16 rows of x", bold=True)
    page.text(
        32,
        144 + LINE,
        "warp s walks stream s through its own ring of\nstages; the four sums meet once in shared memory",
    )
    page.box(390, 124, 350, 92, series=0)
    page.text(402, 144, "gemm_tile, more rows", bold=True)
    page.text(
        402,
        144 + LINE,
        "the block walks s0, s1, s2, s3 and adds each to the\ntotal; with split 4, a block a stream, sums in L2",
    )
    page.box(210, 240, 340, 30, "((s0 + s1) + s2) + s3, in fp32", series=5, size=14)
    page.arrow(195, 216, 300, 240)
    page.arrow(565, 216, 460, 240)
    page.paragraph(
        20,
        296,
        """Rows of x and of W a block, units of a stage, depth of the ring, split, and the layout of W change who adds
        and when, not what is added to what. A row of x has the same bits alone, among 64 and among 240.""",
    )
    then = (
        "then the epilogue, in registers: times 1/rms, bias, residual and next norm, SwiGLU, RoPE and cache, best logit"
    )
    page.box(20, 326, 720, 34, then, series=6)
    return page


def attention_order() -> Drawing:
    """Which key belongs to which stream and split, and how their sums are joined."""
    splits, streams = order_of("sm_90a", 8, 128)
    both = splits * streams
    page = Drawing(760, 396, "Attention: a key's place in the sums is a function of its index alone")
    page.text(
        20, 50, f"keys in units of {KEYS}; unit u belongs to stream u mod {both} ({splits} splits of {streams} streams)"
    )
    names = [0, 1, 2, None, streams - 1, streams, None, both - 1, both, both + 1, None]
    for place, unit in enumerate(names):
        series = 0 if unit is None else (unit % both) // streams % 6 + 1
        words = "..." if unit is None else f"unit {unit}\nstream {unit % both}"
        page.box(20 + place * 65, 60, 65, 40, words, series=series, size=11)
    page.text(20, 128, "a row walks its streams' units upwards: scores, online softmax, weights times values", size=12)
    for s in range(4):
        page.box(
            20 + s * 150, 146, 130, 44, f"stream {s}: units\n{s}, {s + both}, {s + 2 * both} ..", series=1, size=11
        )
        page.arrow(85 + s * 150, 190, 85 + s * 150, 222)
    page.text(622, 172, f"... stream {streams - 1}", size=12)
    page.box(
        20,
        224,
        580,
        30,
        f"split 0 = ((stream 0 + 1) + 2) + ... {streams - 1}: a maximum, a weight, D sums in fp32",
        series=1,
    )
    page.text(610, 244, f"... split {splits - 1}", size=12)
    page.arrow(310, 254, 310, 282)
    last = f"attention_combine: splits 0, 1, .. {splits - 1} in this order, the sink's logit, one division"
    page.box(20, 284, 720, 30, last, series=5)
    page.paragraph(
        20,
        340,
        """A cache that grows adds units at the ends of streams and moves none. A key that a row may not see weighs
        exactly zero; a row's running maximum moves only when that row's own scores ask for it; every product that is
        added is written as one fused operation or one rounded product. So neighbours in the tree and in the batch
        leave no trace.""",
    )
    return page


def attention_slot() -> Drawing:
    """One unit in shared memory: keys and values alike, their columns exchanged."""
    page = Drawing(760, 420, f"Attention: {KEYS} keys and their values in one slot of the ring, head size 128")
    page.text(20, 50, "keys: [half of 8][64-byte piece][key][16-byte column ^ (key / 2)], 4 KB")
    for half in range(2):
        for piece in range(4):
            page.box(20 + piece * 88, 60 + half * 36, 84, 32, f"half {half} piece {piece}", series=piece + 1, size=11)
    page.paragraph(
        390,
        78,
        """ldmatrix fetches one column of eight keys at a time: to lane (g, t) elements 2t and 2t+1 of the column of
        key g, as the second operand of q k^T wants them.""",
        width=54,
    )
    page.text(20, 164, "values: in the same way, 4 KB; one piece of one half, of keys or of values:")
    for key in range(8):
        page.text(14, 192 + key * 22, f"key {key}", size=11)
        for place in range(4):
            column = place ^ (key >> 1)
            page.box(62 + place * 76, 176 + key * 22, 76, 22, f"column {column}", series=column + 1, size=11)
    page.paragraph(
        390,
        192,
        """The exclusive or spreads eight rows of a column over all 32 banks, so the fetch takes one pass. Values are
        fetched from the same places, transposed.""",
        width=54,
    )
    page.paragraph(
        390, 272, "Keys past the end of a sequence are copied as zeros, since 0 times NaN would spoil a sum.", width=54
    )
    page.paragraph(
        20,
        382,
        """attention_streams gives every warp a ring of such slots for its own stream: no block barrier in the walk.
        attention_rows gives the block one ring, and each warp 16 query rows; slots and order are the same.""",
    )
    return page


def main(folder: Path) -> None:
    """Writes all four pictures."""
    for name, draw in (
        ("gemm_layout", gemm_layout),
        ("gemm_order", gemm_order),
        ("attention_order", attention_order),
        ("attention_slot", attention_slot),
    ):
        draw().save(folder / f"{name}.svg")
        print(f"{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "docs" / "img")
