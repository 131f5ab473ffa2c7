"""Fetch the wheels that a GPU machine without a network lacks, for carrying there beside the source tree.

Such machines usually hold torch, transformers and numba but not the notebook stack. Run here, copy the folder, then
there: python3 -m pip install --no-index --no-deps --target SITE .whl/*.whl && export PYTHONPATH=SITE

    python3 tools/fetch_wheels.py [--python 3.12] [--out .whl] [--skip NAME ...]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the lab needs and a torch image usually lacks; their own needs come along.
PACKAGES = (
    "papermill",
    "ipykernel",
    "nbclient",
    "nbconvert",
    "nvtx",
    "pydantic",
    "hypothesis",
    "greenlet",
    "starlette",
    "uvicorn",
)
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)  # pip matches a manylinux tag exactly


def others_in(folder: Path) -> list[str]:
    """Names of what is in a folder and is no wheel; a file in its place counts as well."""
    if folder.exists() and not folder.is_dir():
        return ["a file of that name"]
    return sorted(path.name for path in folder.glob("*") if path.suffix != ".whl" or not path.is_file())


def main() -> int:
    """Download into the folder and print what came; pip's exit status on failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="Python version of the GPU machine")
    parser.add_argument("--out", type=Path, default=ROOT / ".whl", help="folder, ignored by git")
    parser.add_argument("--skip", nargs="*", default=[], help="packages to leave out: the machine has them")
    options = parser.parse_args()

    foreign = others_in(options.out)
    if foreign:
        print(
            f"--out {options.out.name!r} holds {foreign[0]}",
            "  allowed: a new folder, or one with wheels alone, which are replaced",
            "  do: name another folder",
            sep="\n",
            file=sys.stderr,
        )
        return 2
    for wheel in options.out.glob("*.whl"):
        wheel.unlink()
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    platforms += [f"--platform=manylinux{old}_x86_64" for old in ("2014", "2010", "1")]
    target = ["--only-binary=:all:", "--python-version", options.python, "--implementation", "cp", *platforms]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *target, *constraints, "-d", str(options.out)]
    done = subprocess.run([*command, *PACKAGES])
    if done.returncode:
        return done.returncode
    skipped = {re.sub(r"[-_.]+", "_", name).lower() for name in options.skip}
    for wheel in options.out.glob("*.whl"):
        if wheel.name.split("-")[0].lower() in skipped:
            wheel.unlink()
    wheels = sorted(options.out.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {total / 2**20:.1f} MiB in {options.out.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
