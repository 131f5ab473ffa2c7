"""Create the virtual environment and install the project into it, after a look at what would come.

On a machine without a GPU a plain install of torch may fetch several gigabytes of CUDA libraries. This script asks pip
first and stops with the list and the way round it. With a GPU it adds the `gpu` extra.

What hashes.txt covers is fetched with `--require-hashes`: a wheel that is not one of those listed ends the
installation. torch is published in several builds of one version (CPU, CUDA), so one that is not listed is held to the
hash that the index named for it, and this is said. `--hashes require` refuses it; `--hashes ignore` looks at no hash.

    python3 tools/install.py --venv .venv --extras dev -- [arguments for pip]
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HASHES = ROOT / "hashes.txt"
EACH = 25  # wheels between two lines of a log

TOO_LARGE = """\
Stopped before installing: this machine has no NVIDIA GPU, and {n} CUDA packages (several GB) would come with torch:
  {names}
  allowed: a CPU build of torch, or ALLOW_CUDA_WHEELS=1 to install them all the same
  do: give pip a CPU build of torch, then run the same command again. Either
        {pip} install PATH_TO_A_CPU_WHEEL_OF_TORCH
      or name an index or folder that holds one (the selector on the PyTorch site prints it):
        make lab PIP_ARGS="--extra-index-url URL" | make lab PIP_ARGS="--find-links FOLDER"
"""


OTHER_WHEEL = """\
Stopped before the project was installed: pip could not fetch the wheels of hashes.txt, for the reason it printed above.
  allowed: for every pin one of the wheels that hashes.txt lists; where pip speaks of hashes, the index serves another
  do: ask who keeps the index why its wheel differs. If it builds its own and you trust it: make lab HASHES=ignore
"""

TORCH_UNLISTED = """\
hashes.txt lists no build torch {version} like the one that this index serves
  allowed: with --hashes require, a build that it lists
  do: name an index that serves one (PIP_ARGS), or leave --hashes at its default, which takes the index's word for torch
"""


NOT_COVERED = """\
hashes.txt holds no hashes for {here}
  allowed: with --hashes require, a machine and a Python that it covers
  do: use such a Python (make PYTHON=python3.11), or leave --hashes at its default: pins without hashes
"""


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers on this machine."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def torch_to_come(pip: list[str], pip_args: list[str]) -> dict[str, Any] | None:
    """pip's report on the torch that it would fetch now; None if a torch that suits is there already.

    Raises:
        SystemExit: pip finds no torch; its own message has been printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        asked = [*pip, "install", "--dry-run", "--no-deps", "-qq", "--report", str(report)]
        found = subprocess.run([*asked, *pip_args, "torch"])
        if found.returncode:
            raise SystemExit(found.returncode)
        coming = json.loads(report.read_text())["install"]
    return coming[0] if coming else None


def cuda_packages(torch: dict[str, Any] | None) -> list[str]:
    """CUDA packages that a torch to come needs."""
    needs = torch["metadata"].get("requires_dist", []) if torch else []
    return sorted(name for need in needs if (name := need.partition(";")[0].strip()).lower().startswith("nvidia-"))


def not_covered(python: str) -> str:
    """Why hashes.txt says nothing about the wheels of this machine and a Python "3.N"; empty where it does."""
    here = f"{platform.system().lower()} {platform.machine()}"
    covers = HASHES.read_text(encoding="utf-8").split("# covers: ")[1].partition("\n")[0]
    machine, _, pythons = covers.partition(", Python ")
    return "" if here == machine and python in pythons.split() else f"{here}, Python {python}; it covers {covers}"


def hashed_pins(users: set[str], torch: dict[str, Any] | None) -> tuple[list[str], str]:
    """Lines of hashes.txt that some of `users` (lab, an extra, build) need, and the torch that is not listed, if so.

    The line of torch holds the one hash of the torch to come, so that pip takes the build that was looked at; there is
    no line of it when none is to come, or the index names no hash.
    """
    pins, other_build = [], ""
    found = torch["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "") if torch else ""
    for line in HASHES.read_text(encoding="utf-8").splitlines():
        pin, _, needed_by = line.partition(" # ")
        if line.startswith("#") or not users & set(needed_by.split()):
            continue
        if pin.startswith("torch=="):
            version = torch["metadata"]["version"] if torch else ""
            if f"--hash=sha256:{found}" not in pin.split():
                other_build = version
            if not found:
                continue
            pin = f"torch=={version} --hash=sha256:{found}"
        pins.append(pin)
    return pins, other_build


def install_pins(pip: list[str], pip_args: list[str], pins: list[str]) -> int:
    """Fetch and install exactly these wheels, each held to its hash; pip's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "pins.txt"
        listed.write_text("\n".join(pins) + "\n")
        only = ["--require-hashes", "--only-binary=:all:", "--no-deps", "-r", str(listed)]
        # Python compiles a module when it is first imported; all of torch's and transformers' would take a minute.
        status = told_install([*pip, "install", "--progress-bar", "off", "--no-compile", *pip_args, *only], len(pins))
    if status:
        print(OTHER_WHEEL, file=sys.stderr)
    return status


def told_install(command: list[str], n_wheels: int) -> int:
    """Run pip and say how far it is: one line that is written over on a terminal, else a line every `EACH` wheels."""
    is_live, n_fetched = sys.stdout.isatty(), 0
    with tempfile.TemporaryFile("w+") as warnings:  # one a wheel on some machines; shown where the installation failed
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=warnings, text=True) as pip:
            for line in pip.stdout or ():
                if line.startswith(("Collecting ", "Processing ")):
                    n_fetched += 1
                    if is_live or n_fetched % EACH == 0:
                        told = f"  {n_fetched} of {n_wheels} wheels: {line.split()[1].rpartition('/')[2]}"
                        print(f"\r\033[K{told}" if is_live else told, end="" if is_live else "\n", flush=True)
                elif line.startswith("Installing collected packages"):
                    print("\r\033[K" if is_live else "", "  all fetched; unpacking", sep="", flush=True)
        if pip.returncode:
            warnings.seek(0)
            print(warnings.read(), file=sys.stderr)
    return pip.returncode


def main() -> int:
    """Install, or say why not; the exit status of the step that ended it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="dev", help="comma-separated extras of pyproject.toml")
    parser.add_argument("--allow-cuda-wheels", action="store_true", help="skip the look at what would come")
    parser.add_argument("--hashes", choices=("where-listed", "require", "ignore"), default="where-listed")
    parser.add_argument("pip_args", nargs="*", help="passed to pip install")
    options = parser.parse_args()

    if sys.version_info < (3, 11):  # noqa: UP036  (this script may well be started by an older Python)
        print(
            f"Python is {sys.version.split()[0]}", "  allowed: 3.11 or newer", "  do: make PYTHON=python3.11", sep="\n"
        )
        return 2
    if not (options.venv / "bin" / "python").exists():
        print(f"creating {options.venv}", flush=True)
        venv.create(options.venv, with_pip=True)
    return install(options)


def install(options: argparse.Namespace) -> int:
    """The look at torch, the wheels held to their hashes, then the project and what is left; an exit status."""
    python = str(options.venv / "bin" / "python")
    pip = [python, "-m", "pip"]
    gpu = has_gpu()
    extras = [*options.extras.split(","), *(["gpu"] if gpu else [])]
    constrained = ["-c", str(ROOT / "constraints.txt"), *options.pip_args]
    print("asking pip which torch would come", flush=True)
    torch = torch_to_come(pip, constrained)
    names = [] if gpu or options.allow_cuda_wheels else cuda_packages(torch)
    if names:
        print(TOO_LARGE.format(n=len(names), names="\n  ".join(names), pip=" ".join(pip)), file=sys.stderr)
        return 3
    hashed: list[str] = []
    if options.hashes != "ignore":
        status, hashed = install_hashed(python, options, {"lab", "build", *extras}, torch)
        if status:
            return status
    print(f"installing eagle3lab[{','.join(extras)}]", flush=True)
    project = [*pip, "install", "-qq", "--no-compile", *hashed, *constrained, "-e", f"{ROOT}[{','.join(extras)}]"]
    if options.hashes == "require":  # nothing more may be fetched, and nothing may lack
        return subprocess.run([*project, "--no-deps"]).returncode or subprocess.run([*pip, "check"]).returncode
    return subprocess.run(project).returncode


def install_hashed(
    python: str, options: argparse.Namespace, users: set[str], torch: dict[str, Any] | None
) -> tuple[int, list[str]]:
    """Install the wheels of hashes.txt where it covers this machine: an exit status, and arguments for what follows."""
    strict = options.hashes == "require"
    told = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
    if uncovered := not_covered(told.stdout.decode().strip()):
        if not strict:
            print(f"pins without hashes: none for {uncovered}", flush=True)
            return 0, []
        print(NOT_COVERED.format(here=uncovered), file=sys.stderr)
        return 3, []
    pins, other_build = hashed_pins(users, torch)
    if other_build and strict:
        print(TORCH_UNLISTED.format(version=other_build), file=sys.stderr)
        return 3, []
    if other_build:
        print(f"hashes.txt does not list this build of torch, {other_build}: the index's word is taken for it")
    if libraries := cuda_packages(torch):
        print(f"{len(libraries)} CUDA packages come as this torch names them, without hashes of ours")
    print(f"fetching {len(pins)} wheels, each held to its hash", flush=True)
    # The build backend has come with them, so the project is built with that one and not with a second, unchecked.
    return install_pins([python, "-m", "pip"], options.pip_args, pins), ["--no-build-isolation"]


if __name__ == "__main__":
    sys.exit(main())
