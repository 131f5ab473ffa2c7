"""Names of full cache blocks: two blocks have one name exactly if the same tokens lead up to their end.

A name is the SHA-256 of the name before it and of the block's tokens, so no two texts share one by chance or on
purpose. A draft's entry at position j is made of token j + 1 as well, so with a draft a block is complete, and named,
only with the token after it. Source: prefix caching after Kwon et al., arXiv 2309.06180, section 4.4; derived here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def extend_names(names: list[bytes], tokens: Sequence[int], block: int, ahead: int) -> None:
    """Append to `names` those of the further blocks that `tokens` complete.

    Args:
        names: of the first blocks of these tokens, `len(names)` of them; changed in place.
        block: tokens of a block. ahead: tokens behind a block that its rows are made of as well, 0 or 1.
    """
    for first in range(len(names) * block, len(tokens) - block - ahead + 1, block):
        content = array("q", tokens[first : first + block + ahead])
        names.append(sha256((names[-1] if names else b"") + content.tobytes()).digest())
