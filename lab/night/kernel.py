"""The kernel of a notebook: ipykernel, in a process that ends with the one that started it.

Started as `python -m lab.night.kernel PARENT -f CONNECTION_FILE`, where PARENT is the starting process's number.
"""

from __future__ import annotations

import runpy
import sys

from lab.night.orphans import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
