"""The linear maps of a step: y = epilogue(x W^T).

Read `launcher` first, then `reference`, `tiling`, and one kernel: `ring` (few rows), `tile` or `group` (more).
`epilogue` says what becomes of the sums; a new epilogue is a kind there and a branch of `finish`.
"""
