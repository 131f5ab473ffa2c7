"""What the numbers were measured on: one record a run, with a fingerprint that says which runs may be compared.

The record holds no host name and no absolute path. Versions and clocks are recorded but left out of the fingerprint: a
new driver or torch is something the report should show moving, not a reason to forget the history.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path, PurePath

from pydantic import BaseModel, ConfigDict

from lab.rows.gpus import Gpu, find_gpus

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "numba-cuda", "cuda-core", "cuda-bindings",
    "triton", "nvtx", "papermill",
)  # fmt: skip
UNKNOWN = "unknown"  # fingerprint of rows that were carried over from a form that kept none


class Environment(BaseModel):
    """The machine, its software and the state of the source when a run began.

    A record that was carried over from a form that kept less has None for what it did not say.
    """

    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    system: str | None
    machine: str | None
    cpu: str | None
    n_cores: int | None
    python: str | None
    packages: dict[str, str | None]
    cuda: str | None
    gpus: list[Gpu]
    no_gpu_reason: str | None
    commit: str | None
    dirty: bool | None
    source: str | None
    argv: list[str]

    def lines(self) -> list[tuple[str, str]]:
        """Label and text of each fact, for people."""
        gpus = ", ".join(gpu.name for gpu in self.gpus) or f"none ({self.no_gpu_reason})"
        commit = (self.commit or "not a git checkout") + (" with uncommitted changes" if self.dirty else "")
        facts = [
            ("GPU", gpus),
            ("CPU", f"{self.cpu}, {self.n_cores} cores"),
            ("System", f"{self.system} on {self.machine}, Python {self.python}"),
            ("Packages", ", ".join(f"{name} {version or 'absent'}" for name, version in self.packages.items())),
            ("CUDA of torch", self.cuda or "none"),
            ("Source", f"commit {commit}; content {self.source}"),
            ("Command", " ".join(self.argv)),
            ("Fingerprint", self.fingerprint),
        ]
        for gpu in self.gpus:
            facts.append((f"{gpu.name} clocks", _clocks(gpu)))
        return facts


def collect() -> Environment:
    """The record of this machine, now. Imports torch to ask whether it can use a GPU."""
    gpus, reason = find_gpus()
    cpu, n_cores = cpu_model(), os.cpu_count() or 1
    system = platform.system()
    commit, dirty = git_state()
    return Environment(
        fingerprint=fingerprint(system, platform.machine(), cpu, n_cores, gpus),
        system=f"{system} {platform.release()}",
        machine=platform.machine(),
        cpu=cpu,
        n_cores=n_cores,
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        cuda=_torch_cuda(),
        gpus=gpus,
        no_gpu_reason=reason,
        commit=commit,
        dirty=dirty,
        source=source_hash(),
        argv=shown_argv(sys.argv),
    )


def fingerprint(system: str, machine: str, cpu: str, n_cores: int, gpus: list[Gpu]) -> str:
    """Twelve hex digits over what decides speed: system, CPU model, cores, GPU models and their memory."""
    kinds = [(gpu.name, gpu.memory_mib) for gpu in gpus]
    text = json.dumps([system, machine, cpu, n_cores, kinds])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _clocks(gpu: Gpu) -> str:
    return (
        f"SM {gpu.sm_clock_mhz or '?'} of {gpu.max_sm_clock_mhz or '?'} MHz, memory {gpu.memory_clock_mhz or '?'} MHz, "
        f"power limit {gpu.power_limit_w or '?'} W, {gpu.temperature_c or '?'} °C, driver {gpu.driver or '?'}"
    )


def cpu_model() -> str:
    """The CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def checkout() -> Path | None:
    """The root of the source checkout this package runs from; None when it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").exists() and (root / "notebooks").is_dir() else None


def git_state() -> tuple[str | None, bool | None]:
    """Commit of the checkout (12 hex digits) and whether tracked files differ from it; None outside git."""
    root = checkout()
    if root is None:
        return None, None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changed is None or commit is None else bool(changed)


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def source_hash(root: Path | None = None) -> str:
    """Twelve hex digits over every source and settings file of both packages: what a job's result depends on."""
    root = root or Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in ("eagle3core", "lab"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix not in (".py", ".json", ".toml") or "__pycache__" in path.parts:
                continue
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def shown_argv(argv: list[str]) -> list[str]:
    """The command line with absolute paths cut to their last part, so that a report tells no one's folders."""
    program = Path(argv[0]).name if argv else ""
    shown = ["eagle3lab" if program == "__main__.py" else program]
    for word in argv[1:]:
        option, equals, value = word.partition("=")
        shown.append(f"{option}={shown_path(value)}" if equals else shown_path(word))
    return shown


def shown_path(text: str) -> str:
    """`text`, or `…/name` when it is an absolute path."""
    path = PurePath(text)
    return f"…/{path.name}" if path.is_absolute() else text
