"""What is wrong and what to change: a machine where nothing runs, a pair that does not load, a head that drafts badly.

`machine` looks at this computer and at a pair's files; `draft` measures why a head's acceptance is what it is. Nothing
else in the lab may import this room but the command line, the nights' door and notebooks.
"""

from lab.doctor.machine import Check, conclusion, examine, examine_pair, exit_code

__all__ = ["Check", "conclusion", "examine", "examine_pair", "exit_code"]
