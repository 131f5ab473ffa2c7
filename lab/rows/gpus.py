"""The GPUs that torch can use, each with what the driver says of that very one, and a GPU's clocks at this moment.

Two GPUs of one model differ in uuid, clocks and temperature, and CUDA_VISIBLE_DEVICES renumbers them: torch's device 0
may be the driver's 3. So devices are matched by uuid, never by name or number.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict

_NVIDIA_SMI = "nvidia-smi"
_TIMEOUT_S = 20
_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
_TEXTS = ("name", "uuid", "driver")
_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
_CLOCKS_KEEP_S = 2.0  # asking takes the driver tens of milliseconds


class Gpu(BaseModel):
    """One GPU as the driver describes it; `None` where the driver does not say."""

    model_config = ConfigDict(extra="forbid")

    name: str
    uuid: str | None = None
    driver: str | None = None
    memory_mib: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None


def find_gpus() -> tuple[list[Gpu], str | None]:
    """The GPUs that torch can use, in its order, described by the driver, and the reason when there is none."""
    try:
        import torch
    except ImportError as error:
        return [], f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return [], f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return [], f"torch {torch.__version__} sees no CUDA device (driver absent, too old, or hidden)"
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    described = ask_driver()
    return [described_as(device, described) for device in devices], None


def ask_driver() -> list[Gpu]:
    """What `nvidia-smi` says of each GPU, hidden ones included; empty where it is absent or does not answer."""
    try:
        return [_parsed(line) for line in ask(list(_FIELDS.values()))]
    except (OSError, subprocess.SubprocessError):
        return []


def ask(fields: Sequence[str], gpu: str | None = None) -> list[str]:
    """The driver's answers: a line a GPU, the fields separated by commas.

    Args:
        gpu: uuid of the only one to ask about.

    Raises:
        OSError: there is no `nvidia-smi`.
        subprocess.SubprocessError: it failed, or did not answer in time.
    """
    command = [_NVIDIA_SMI, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(
        [*command, *([f"--id={gpu}"] if gpu else [])], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    return [line for line in done.stdout.splitlines() if line.strip()]


def described_as(device: Any, described: Sequence[Gpu]) -> Gpu:
    """A device of torch as the driver describes it.

    Where torch or the driver gives no uuid, only what all GPUs of that name have in common is taken over.

    Args:
        device: properties of a CUDA device; `name`, and `uuid` where torch is new enough to tell it.
    """
    uuid = uuid_of(device)
    for gpu in described:
        if uuid is not None and gpu.uuid == uuid:
            return gpu
    alike = [gpu.model_dump() for gpu in described if gpu.name == device.name]
    if (uuid is not None and any(gpu["uuid"] for gpu in alike)) or not alike:
        # The driver knows uuids and this one is not among them, so those of its name are other GPUs.
        return Gpu(name=device.name, uuid=uuid)
    common = {key: value for key, value in alike[0].items() if all(gpu[key] == value for gpu in alike)}
    return Gpu(**{**common, "name": device.name, "uuid": uuid or common.get("uuid")})


def uuid_of(device: Any) -> str | None:
    """A CUDA device's uuid as the driver writes it; None where torch does not tell it."""
    uuid = getattr(device, "uuid", None)
    if uuid is None:
        return None
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def current_gpu() -> str | None:
    """The uuid of the GPU that torch works on now; None where there is none or torch does not tell it."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return uuid_of(torch.cuda.get_device_properties(torch.cuda.current_device()))


def clocks() -> dict[str, float | str | None]:
    """Clocks, power and temperature of the GPU that torch works on, or why they are not known."""
    return dict(_clocks(current_gpu(), int(time.monotonic() / _CLOCKS_KEEP_S)))


@lru_cache(maxsize=1)
def _clocks(gpu: str | None, moment: int) -> dict[str, float | str | None]:
    try:
        answers = ask(list(_CLOCKS.values()), gpu)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": f"{_NVIDIA_SMI} gave no answer: {type(error).__name__}"}
    parts = [part.strip() for part in answers[0].split(",")] if len(answers) == 1 else []
    if len(parts) != len(_CLOCKS):
        return {"unknown": f"{_NVIDIA_SMI} answered for {len(answers)} GPUs"}
    return {name: _number(part) for name, part in zip(_CLOCKS, parts, strict=True)}


def _parsed(line: str) -> Gpu:
    texts = dict(zip(_FIELDS, (part.strip() for part in line.split(",")), strict=False))
    return Gpu.model_validate({key: text if key in _TEXTS else _number(text) for key, text in texts.items()})


def _number(text: str) -> float | None:
    """A number, or None where the driver writes "[N/A]" or "Not Supported"."""
    try:
        return float(text)
    except ValueError:
        return None
