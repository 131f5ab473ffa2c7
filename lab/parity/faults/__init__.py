"""Bugs to plant, at least one for every stage, to see that parity finds each one where it is.

A check that has never failed is a hope. `plant` gives an engine with a known bug in its weights or in its programs: the
same programs that ship, with the same kernels where kernels run; `FAULTS` says at which stage and in which pass the bug
must be named. Most are bugs that EAGLE code bases have really had, and that verification hides: the output stays right
and only the acceptance length falls, or even rises. A new bug is a value in `of_target`, `of_experts`,
`of_formats`, `of_draft` or `of_reach`.

What no stage of a pass shows has its own table, `RUN_FAULTS`: bugs of trees and small models (`of_trees`), of look-ups
and of the account of cache blocks (`of_books`), of batches, kept blocks and drawn drafts (`of_serving`), of caches in
FP8 (`of_caches`). Each says which check of whole runs fails: tokens, drafts, account or shares.
"""

from lab.parity.faults.fault import Fault, Place
from lab.parity.faults.plant import FAULTS, RUN_FAULTS, changed, named, plant, plant_in_run, run_fault, with_fault
from lab.parity.faults.run_fault import RunFault

__all__ = [
    "FAULTS",
    "RUN_FAULTS",
    "Fault",
    "Place",
    "RunFault",
    "changed",
    "named",
    "plant",
    "plant_in_run",
    "run_fault",
    "with_fault",
]
