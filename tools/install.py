"""Create the virtual environment and install the project into it, after a look at what would come.

On a machine without a GPU a plain install of torch may fetch several gigabytes of CUDA libraries. This script asks pip
first and stops with the list and the way round it. With a GPU it adds the `gpu` extra.

    python3 tools/install.py --venv .venv --extras dev -- [arguments for pip]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TOO_LARGE = """\
Stopped before installing: this machine has no NVIDIA GPU, and {n} CUDA packages (several GB) would come with torch:
  {names}
  allowed: a CPU build of torch, or ALLOW_CUDA_WHEELS=1 to install them all the same
  do: give pip a CPU build of torch, then run the same command again. Either
        {pip} install PATH_TO_A_CPU_WHEEL_OF_TORCH
      or name an index or folder that holds one (the selector on the PyTorch site prints it):
        make lab PIP_ARGS="--extra-index-url URL" | make lab PIP_ARGS="--find-links FOLDER"
"""


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers on this machine."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def cuda_packages(pip: list[str], pip_args: list[str]) -> list[str]:
    """CUDA packages that the torch which pip would fetch now needs; none if a torch is there already.

    Raises:
        SystemExit: pip finds no torch; its own message has been printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        asked = [*pip, "install", "--dry-run", "--no-deps", "-qq", "--report", str(report)]
        found = subprocess.run([*asked, *pip_args, "torch"])
        if found.returncode:
            raise SystemExit(found.returncode)
        coming = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    needs = [line.partition(";")[0].strip() for torch in coming for line in torch.get("requires_dist", [])]
    return sorted(need for need in needs if need.lower().startswith("nvidia-"))


def main() -> int:
    """Install, or say why not; the exit status of the step that ended it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="dev", help="comma-separated extras of pyproject.toml")
    parser.add_argument("--allow-cuda-wheels", action="store_true", help="skip the look at what would come")
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
    pip = [str(options.venv / "bin" / "python"), "-m", "pip"]
    gpu = has_gpu()
    extras = ",".join([options.extras, "gpu"] if gpu else [options.extras])
    constrained = ["-c", str(ROOT / "constraints.txt"), *options.pip_args]
    if not gpu and not options.allow_cuda_wheels:
        print("no GPU here: asking pip which torch would come", flush=True)
        names = cuda_packages(pip, constrained)
        if names:
            text = TOO_LARGE.format(n=len(names), names="\n  ".join(names), pip=" ".join(pip))
            print(text, file=sys.stderr)
            return 3
    print(f"installing eagle3lab[{extras}]", flush=True)
    # Python compiles a module when it is first imported; all of torch's and transformers' would take a minute.
    install = [*pip, "install", "-qq", "--no-compile", *constrained, "-e", f"{ROOT}[{extras}]"]
    return subprocess.run(install).returncode


if __name__ == "__main__":
    sys.exit(main())
