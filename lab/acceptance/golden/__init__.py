"""Acceptance lengths that were kept, and whether a run still gives them.

Imports acceptance's counts, `options`, `rows` and `pairs`. A newcomer may change the tolerance that a length gets by
itself, and the words of the verdict.
"""

from lab.acceptance.golden.lengths import judge_lengths

__all__ = ["judge_lengths"]
