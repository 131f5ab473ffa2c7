"""Where the bits of two runs part: `eagle3lab inspect bits`.

Both runs decode the same prompts; every row of every stage of the target becomes one number on the device (`hashes`),
which is compared by request, position and stage (`compare`), whatever the passes were that computed it.
"""
