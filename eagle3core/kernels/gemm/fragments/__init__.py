"""The epilogues over sums as the tensor cores leave them, by the warp that made them: no sum changes its lane.

A piece is 16 rows of W by 8 of x. Of it lane l holds W rows g and g + 8 of x rows 2t and 2t + 1, g = l / 4, t = l % 4:
pair g of two rows of x, whole. What becomes of them is computed there and rounded to 16 bits; then one exchange
transposes 8 x rows by 8 columns, and the lane has columns 2t and 2t + 1 of x row g: words, 16 bytes a row in a piece.
So an epilogue takes one exchange a word that it stores, and no operand is fetched twice.

Bits equal those of `finish`, which has an item a lane: `values` computes for both.

Source: derived here; fragment layouts and movmatrix from the PTX ISA.

`walk` goes over the pieces of a warp, `kinds` has the epilogues; a new one is a function there that gives the four
things which its first lines name. Words are stored and the residual is read whole: they lie at multiples of 4 bytes.
`gemm.held` alone imports this.
"""
