"""Each GPU that torch uses is described as itself, whatever its model, number and the variable that hides others."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.rows import environment, gpus
from lab.rows.gpus import Gpu, ask_driver, clocks, current_gpu, described_as, find_gpus
from lab.rows.throttle import held_back

pytestmark = pytest.mark.reference

# What the driver knows of this machine: two GPUs of one model that differ in everything else, and one of another.
DRIVER = {
    "GPU-aaaa": {"name": "NVIDIA H200", "clocks.sm": "345", "temperature.gpu": "31", "power.draw": "78.8",
                 "clocks_event_reasons.hw_slowdown": "Not Active"},
    "GPU-bbbb": {"name": "NVIDIA H200", "clocks.sm": "1980", "temperature.gpu": "64", "power.draw": "[N/A]",
                 "clocks_event_reasons.hw_slowdown": "Active"},
    "GPU-cccc": {"name": "NVIDIA A100", "clocks.sm": "1410", "temperature.gpu": "40", "power.draw": "55",
                 "clocks_event_reasons.hw_slowdown": "Not Active"},
}  # fmt: skip
COMMON = {
    "driver_version": "580.1", "memory.total": "143771", "clocks.max.sm": "1980", "clocks.mem": "3201",
    "power.limit": "700.00", "clocks_event_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_event_reasons.sw_thermal_slowdown": "Not Active",
    "clocks_event_reasons.hw_power_brake_slowdown": "Not Active",
}  # fmt: skip
FAKE = """#!{python}
import sys
driver, common = {driver!r}, {common!r}
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
fields = options["query-gpu"].split(",")
chosen = [uuid for uuid in driver if options.get("id") in (None, uuid)]
if not chosen:
    sys.exit("No devices were found")
for uuid in chosen:
    facts = {{**common, **driver[uuid], "uuid": uuid}}
    print(", ".join(facts[field] for field in fields))
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's tool, found first in PATH."""
    path = tmp_path / "nvidia-smi"
    path.write_text(FAKE.format(python=sys.executable, driver=DRIVER, common=COMMON))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpus._clocks.cache_clear()


def visible(monkeypatch: pytest.MonkeyPatch, *uuids: str, current: int = 0, tells_uuid: bool = True) -> None:
    """torch as it is where CUDA_VISIBLE_DEVICES names these GPUs in this order: they become 0, 1, ..."""
    devices = [
        SimpleNamespace(name=DRIVER[uuid]["name"], **({"uuid": uuid.removeprefix("GPU-")} if tells_uuid else {}))
        for uuid in uuids
    ]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: devices[index])


def test_two_gpus_of_one_model_keep_their_own_uuid_clock_and_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    visible(monkeypatch, "GPU-aaaa", "GPU-bbbb")
    found, reason = find_gpus()
    assert reason is None
    assert [(gpu.uuid, gpu.sm_clock_mhz, gpu.temperature_c) for gpu in found] == [
        ("GPU-aaaa", 345.0, 31.0),
        ("GPU-bbbb", 1980.0, 64.0),
    ]
    assert {gpu.driver for gpu in found} == {"580.1"}


@pytest.mark.parametrize("uuids", [("GPU-bbbb",), ("GPU-cccc", "GPU-bbbb"), ("GPU-bbbb", "GPU-aaaa")])
def test_gpus_that_a_variable_hides_or_renumbers_are_mapped_to_the_drivers(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...]
) -> None:
    visible(monkeypatch, *uuids)
    found, _ = find_gpus()
    assert [gpu.uuid for gpu in found] == list(uuids)
    assert [gpu.temperature_c for gpu in found] == [float(DRIVER[uuid]["temperature.gpu"]) for uuid in uuids]
    assert len(ask_driver()) == 3, "the driver tells of hidden ones too"
    record = environment.collect()
    assert [gpu.uuid for gpu in record.gpus] == list(uuids)


@pytest.mark.parametrize(("current", "uuid"), [(0, "GPU-bbbb"), (1, "GPU-aaaa")])
def test_clocks_and_their_limits_are_those_of_the_gpu_in_use(
    monkeypatch: pytest.MonkeyPatch, current: int, uuid: str
) -> None:
    visible(monkeypatch, "GPU-bbbb", "GPU-aaaa", current=current)
    assert current_gpu() == uuid
    power = None if uuid == "GPU-bbbb" else 78.8  # which the driver does not say of that one
    assert clocks() == {
        "sm_mhz": float(DRIVER[uuid]["clocks.sm"]), "memory_mhz": 3201.0, "power_w": power,
        "temperature_c": float(DRIVER[uuid]["temperature.gpu"]),
    }  # fmt: skip
    assert held_back() == ("hw slowdown" if uuid == "GPU-bbbb" else "")


def test_without_uuids_only_what_gpus_of_one_name_share_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    visible(monkeypatch, "GPU-bbbb", "GPU-cccc", tells_uuid=False)
    (shared, alone), _ = find_gpus()
    assert (shared.uuid, shared.sm_clock_mhz, shared.temperature_c) == (None, None, None), "it may be either of two"
    assert (shared.driver, shared.memory_mib, shared.power_limit_w) == ("580.1", 143771.0, 700.0)
    assert (alone.uuid, alone.temperature_c) == ("GPU-cccc", 40.0), "there is one of that name"
    assert clocks() == {"unknown": "nvidia-smi answered for 3 GPUs"}
    assert held_back() is None


def test_a_gpu_that_the_driver_does_not_list_is_not_described_as_another() -> None:
    part = SimpleNamespace(name="NVIDIA H200", uuid="MIG-1234")
    assert described_as(part, ask_driver()) == Gpu(name="NVIDIA H200", uuid="MIG-1234")
    unknown = SimpleNamespace(name="NVIDIA B200")
    assert described_as(unknown, ask_driver()) == Gpu(name="NVIDIA B200")


def test_where_there_is_no_driver_nothing_is_known_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").unlink()
    visible(monkeypatch, "GPU-aaaa")
    assert ask_driver() == []
    assert find_gpus() == ([Gpu(name="NVIDIA H200", uuid="GPU-aaaa")], None)
    assert held_back() is None
    assert clocks() == {"unknown": "nvidia-smi gave no answer: FileNotFoundError"}


def test_the_fingerprint_is_of_models_and_memory_and_not_of_which_gpu_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = set()
    for uuid in ("GPU-aaaa", "GPU-bbbb"):
        visible(monkeypatch, uuid)
        fingerprints.add(environment.collect().fingerprint)
    visible(monkeypatch, "GPU-bbbb", tells_uuid=False)
    fingerprints.add(environment.collect().fingerprint)
    assert len(fingerprints) == 1
