"""One request in a process that has just begun, part by part: run as a module, it prints one JSON line.

    python3 -m lab.probes.start.first_request MOMENT '{"geometry": "nano", "k": 3, ...}'

MOMENT is when the process was asked for, on the clock that all processes share (`time.monotonic`).
"""

from __future__ import annotations

import json
import sys
import time

BEGAN = time.monotonic()  # before anything large is imported


def main() -> None:
    """Makes the request and prints what each part took, seconds."""
    asked, wanted = float(sys.argv[1]), json.loads(sys.argv[2])
    from lab.probes.start.parts import first_request

    imported = time.monotonic()
    before = {"process": BEGAN - asked, "imports": imported - BEGAN}
    print(json.dumps(first_request(before, **wanted)))


if __name__ == "__main__":
    main()
