"""What this machine can run, and why not the rest: one line a part, each with what to do about it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lab.errors import EXIT_COULD_NOT_RUN, EXIT_PASSED, ExperimentError, LabError
from lab.rows.gpus import ask_driver, find_gpus

# A night's folder takes a few MiB; below this a full disk is a matter of days.
MIN_FREE_BYTES = 500 * 1024 * 1024
_KERNEL_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Check:
    """One part: whether it is there, what was found or why not, and the remedy; `needed` parts decide `make lab`."""

    part: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = False

    def line(self) -> str:
        """The check for people."""
        word = "ok     " if self.ok else "missing"
        remedy = f"\n             {self.remedy}" if self.remedy and not self.ok else ""
        return f"{word}  {self.part}: {self.found}{remedy}"


def examine(*, from_notebook: bool = False) -> list[Check]:
    """All checks in order; inside a notebook, without the kernel (it runs) and the pair (the night has chosen one)."""
    parts: list[Callable[[], Check]] = [python, torch_cpu, gpu, numba_cuda]
    if not from_notebook:
        parts += [kernel, shipped_pair]
    parts += [disk, lambda: tool("nsys", "Nsight Systems"), lambda: tool("ncu", "Nsight Compute")]
    return [part() for part in parts]


def exit_code(checks: list[Check]) -> int:
    """0 if `make lab` could run here, else 3."""
    return EXIT_PASSED if all(check.ok for check in checks if check.needed) else EXIT_COULD_NOT_RUN


def conclusion(checks: list[Check]) -> str:
    """One sentence at the end."""
    lost = [check.part for check in checks if check.needed and not check.ok]
    if lost:
        return f"`make lab` cannot run here yet: {', '.join(lost)}."
    has_gpu = any(check.part == "GPU" and check.ok for check in checks)
    where = "on the GPU" if has_gpu else "on the CPU; GPU parts will be reported as missing"
    return f"`make lab` can run here, {where}."


def examine_pair(
    target: Path | None, draft: Path | None, *, method: str = "eagle3", norm_output: str | None = None
) -> int:
    """Prints everything that keeps a pair from being loaded, and how the draft's files were read; 3 if it does not fit.

    Raises:
        ExperimentError: only one of the two was given.
    """
    if target is None or draft is None:
        given, absent = ("--target", "--draft") if draft is None else ("--draft", "--target")
        raise ExperimentError(f"{given} was given without {absent}", "both or neither", f"add {absent} DIR")
    from eagle3core.checkpoint import preflight

    looked = preflight(target, draft, method=method, norm_output=norm_output)
    print("\n".join(looked.lines))
    n = len(looked.errors)
    print("The pair can be loaded." if looked.passed else f"The pair cannot be loaded: {n} finding{'s' * (n != 1)}.")
    return EXIT_PASSED if looked.passed else EXIT_COULD_NOT_RUN


def python() -> Check:
    """The interpreter."""
    return Check(
        "Python",
        sys.version_info >= (3, 11),
        sys.version.partition(" ")[0],
        "make the virtual environment with Python 3.11 or newer",
        needed=True,
    )


def torch_cpu() -> Check:
    """torch computes on the CPU."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", False, f"cannot be imported: {error}", "install it: `make lab` does", needed=True)
    total = float(torch.ones(3).sum())
    return Check("torch", total == 3.0, f"{torch.__version__} computes on the CPU", "reinstall torch", needed=True)


def gpu() -> Check:
    """A CUDA device that torch can use, with its compute capability."""
    found, reason = find_gpus()
    if not found:
        by_driver = ask_driver()
        seen = f"; the driver sees {', '.join(device.name for device in by_driver)}" if by_driver else ""
        remedy = (
            "install a CUDA build of torch for this driver"
            if by_driver
            else "nothing to do for a CPU run; with an NVIDIA GPU, install its driver and a CUDA build of torch"
        )
        return Check("GPU", False, f"{reason}{seen}", remedy)
    import torch

    names = []
    for index, device in enumerate(found):
        major, minor = torch.cuda.get_device_capability(index)
        names.append(f"{device.name} (compute capability {major}.{minor}, driver {device.driver or 'unknown'})")
    return Check("GPU", True, "; ".join(names))


def numba_cuda() -> Check:
    """numba-cuda is installed, and drives the device where there is one."""
    try:
        installed = version("numba-cuda")
    except PackageNotFoundError:
        return Check("numba-cuda", False, "not installed", "pip install numba-cuda, with the constraints file")
    if not find_gpus()[0]:
        return Check("numba-cuda", True, f"{installed} (no GPU: kernels can be compiled, not run)")
    from numba import cuda

    usable = bool(cuda.is_available())  # type: ignore[no-untyped-call]
    said = "drives the GPU" if usable else "does not see the GPU"
    return Check("numba-cuda", usable, f"{installed} {said}", 'install the CUDA toolkit wheels: pip install ".[gpu]"')


def kernel() -> Check:
    """A notebook really runs, through papermill, in a kernel of this interpreter."""
    from lab.night.notebook import run_notebook

    probe = (
        '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code", "id": "parameters", '
        '"metadata": {"tags": ["parameters"]}, "outputs": [], "execution_count": null, "source": "there: str = \'\'"}, '
        '{"cell_type": "code", "id": "probe", "metadata": {}, "outputs": [], "execution_count": null, '
        '"source": "import pathlib, sys; pathlib.Path(there).write_text(sys.executable)"}]}'
    )
    with tempfile.TemporaryDirectory() as scratch:
        source, answer = Path(scratch) / "probe.ipynb", Path(scratch) / "answer"
        source.write_text(probe, encoding="utf-8")
        try:
            outcome = run_notebook(source, Path(scratch) / "out", {"there": str(answer)}, timeout_s=_KERNEL_TIMEOUT_S)
        except (LabError, OSError) as error:
            return Check("notebooks", False, str(error), "reinstall papermill and ipykernel", needed=True)
        answered = answer.read_text(encoding="utf-8") if answer.exists() else ""
        if answered and answered != sys.executable:
            said = f"papermill ran one in {answered}, not in {sys.executable}"
            return Check("notebooks", False, said, "run python3 -m ipykernel install --sys-prefix", needed=True)
        said = f"papermill ran one in this interpreter in {outcome.seconds:.1f} s" if answered else str(outcome.error)
        return Check("notebooks", bool(answered), said, "reinstall papermill and ipykernel", needed=True)


def shipped_pair() -> Check:
    """The trained pair that comes with the package."""
    from lab import pairs

    try:
        pair = pairs.shipped_pair()
    except LabError as error:
        return Check("shipped pair", False, error.what, error.remedy, needed=True)
    n_bytes = sum(file.stat().st_size for folder in (pair.target, pair.draft) for file in folder.glob("*"))
    return Check("shipped pair", True, f"target and draft, {n_bytes / 2**20:.1f} MiB", needed=True)


def disk() -> Check:
    """Room for reports in the current folder."""
    free = shutil.disk_usage(Path.cwd()).free
    return Check(
        "disk", free >= MIN_FREE_BYTES, f"{free / 2**30:.1f} GiB free here", "free at least 500 MiB", needed=True
    )


def tool(command: str, name: str) -> Check:
    """An optional command-line tool, asked for its version."""
    if shutil.which(command) is None:
        return Check(
            name, False, f"no `{command}` on the path", "only profiling needs it; it comes with the CUDA toolkit"
        )
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name, False, f"`{command} --version` failed: {error}", "reinstall it")
    told = done.stdout.strip().splitlines()
    return Check(name, True, told[-1] if told else "installed")
