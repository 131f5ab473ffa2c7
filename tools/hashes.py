"""Write `hashes.txt`: the SHA-256 of every wheel that the pins of constraints.txt may mean, and what needs it.

Run it after a change of constraints.txt or pyproject.toml, with uv on the path (`pip install uv`). uv asks the index
for the wheels of each Python; pip, in the Python that runs this, for what each extra needs. Nothing is installed.

    .venv/bin/python tools/hashes.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "x86_64-manylinux_2_40"  # takes wheels of every older glibc as well
EXTRAS = ("dev", "compile", "serve", "parquet", "gpu", "jupyter", "browser")
HEAD = """\
# SHA-256 of the wheels of constraints.txt, written by tools/hashes.py; behind each, what needs it.
# (lab: the project itself; build: its backend; the others: extras of pyproject.toml)
# covers: linux x86_64, Python {pythons}
"""


def hashes_of_wheels(python: str, folder: Path) -> dict[str, set[str]]:
    """By canonical name: the hashes of the wheels of each pin that suit a Python on `PLATFORM`."""
    lock = folder / "pylock.toml"
    asked = ["uv", "pip", "compile", "--quiet", "--no-deps", "--format", "pylock.toml", "-o", str(lock)]
    target = ["--python-version", python, "--python-platform", PLATFORM]
    subprocess.run([*asked, *target, str(ROOT / "constraints.txt")], check=True, stdout=subprocess.DEVNULL)
    packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    lock.unlink()
    return {package["name"]: {wheel["hashes"]["sha256"] for wheel in package["wheels"]} for package in packages}


def requirements_of(folder: Path) -> dict[str, list[Requirement]]:
    """By canonical name: what each package that pip would install here for all extras requires."""
    report = folder / "report.json"
    asked = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq", "--report", str(report)]
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    project = f"{ROOT}[{','.join(EXTRAS)}]"
    subprocess.run([*asked, "-c", str(ROOT / "constraints.txt"), project, *backend, "editables"], check=True)
    parts = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    known = {canonicalize_name(part["name"]): [*map(Requirement, part.get("requires_dist", []))] for part in parts}
    known["build"] = [*map(Requirement, backend), Requirement("editables")]
    return known


def needed_by(start: str, extras: set[str], known: dict[str, list[Requirement]]) -> set[str]:
    """Canonical names of all that a package with extras needs, directly or not."""
    seen: set[tuple[str, str]] = set()
    left = [(start, extra) for extra in (extras or {""})]
    while left:
        name, extra = left.pop()
        for need in known.get(name, []):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                found = {(canonicalize_name(need.name), wanted) for wanted in {"", *need.extras}}
                left += found - seen
                seen |= found
    return {name for name, _ in seen}


def main() -> int:
    """Write the file and say how much it holds."""
    hashes: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        for python in PYTHONS:
            for name, wheels in hashes_of_wheels(python, Path(folder)).items():
                hashes[name] |= wheels
        known = requirements_of(Path(folder))
    users = {"lab": needed_by("eagle3lab", set(), known), "build": needed_by("build", set(), known)}
    users |= {extra: needed_by("eagle3lab", {extra}, known) - users["lab"] for extra in EXTRAS}
    lines = []
    for pin in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name = canonicalize_name(pin.partition("==")[0])
        if pin and not pin.startswith("#"):
            uses = [user for user, needs in users.items() if name in needs]
            lines.append(" ".join([pin, *(f"--hash=sha256:{one}" for one in sorted(hashes[name])), "#", *uses]))
    head = HEAD.format(pythons=" ".join(".".join(python.split(".")[:2]) for python in PYTHONS))
    (ROOT / "hashes.txt").write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} pins, {sum(map(len, hashes.values()))} wheels in hashes.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
