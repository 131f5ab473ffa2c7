"""Launches on a GPU: kernels loaded for the device of their operands, prebound, programmatic dependent launch.

`bind(launches)` gives a callable that only enqueues: no allocation, no check, no host read, fit for CUDA-graph capture.
Machine code comes from `cubins`: neither Numba nor a compiler is needed on a GPU machine whose cubins were built ahead.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from eagle3core.errors import BackendUnavailable, InvariantViolated, KernelLimit
from eagle3core.kernels.card import PLAIN_TORCH, SHARED_BYTES, Launch, Variant, arch_of
from eagle3core.kernels.cubins import cubin, digest

_DEFAULT_SHARED = 48 * 1024  # a block may have this much without asking
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
_lock = threading.Lock()


def device_arch(device: torch.device | None = None) -> str:
    """Compile target of a CUDA device, the current one by default.

    Raises:
        BackendUnavailable: torch sees no CUDA device.
        KernelLimit: the kernels have no compile target for its compute capability.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "GPU kernels were asked for and torch sees no CUDA device", "a GPU of compute capability 8.0 or later",
            f"{PLAIN_TORCH}; or run the kernels in the emulator",
        )  # fmt: skip
    return arch_of(torch.cuda.get_device_capability(device))


def bind(launches: Sequence[Launch]) -> Callable[[], None]:
    """A callable that enqueues `launches` on torch's current stream of their device; operands keep their addresses.

    The callable holds references to the operand tensors. Kernels are loaded here, so that nothing is compiled or
    loaded later, inside a graph capture. The device is that of the operands, whichever is current.

    Raises:
        BackendUnavailable: no GPU, or a kernel that has no cubin here and no compiler to make one.
        KernelLimit: a launch asks for more shared memory than a block of this device has.
        InvariantViolated: operands lie on two GPUs.
    """
    device = operands_device(launches)
    arch = device_arch(device)
    from cuda.core import Stream, launch  # type: ignore[import-untyped]

    with torch.cuda.device(device):  # loading makes a device current: the caller's comes back
        index = torch.cuda.current_device()
        bound = [(_config(item), _kernel(item.variant, arch, index), _arguments(item)) for item in launches]
    operands = [value for item in launches for value in item.values]

    def enqueue() -> None:
        with torch.cuda.device(index):
            stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
            for config, kernel, arguments in bound:
                launch(stream, config, kernel, *arguments)

    enqueue.operands = operands  # type: ignore[attr-defined]
    return enqueue


def operands_device(launches: Sequence[Launch]) -> torch.device | None:
    """The GPU that the operands of `launches` lie on; None, the current one, where no operand says.

    Operands in the host's memory, which every GPU reaches where it is pinned, do not count.

    Raises:
        InvariantViolated: they lie on two.
    """
    tensors = (value for item in launches for value in item.values if isinstance(value, torch.Tensor))
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if len(devices) > 1:
        raise InvariantViolated(
            f"operands of launches that are bound together lie on {', '.join(sorted(map(str, devices)))}",
            "one GPU for all of them", "bind the launches of each GPU by themselves",
        )  # fmt: skip
    return next(iter(devices), None)


def load(variants: Sequence[Variant], device: torch.device) -> None:
    """Load kernels onto a GPU, so that `bind` finds them there.

    Raises:
        BackendUnavailable, KernelLimit: as `bind`.
    """
    arch = device_arch(device)
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        for variant in variants:
            _kernel(variant, arch, index)


def execute(launches: Sequence[Launch]) -> None:
    """Enqueue `launches` once: `emulator.execute`'s twin on the GPU."""
    bind(launches)()


def _config(item: Launch) -> Any:
    from cuda.core import LaunchConfig

    cluster = item.variant.cluster
    clusters = {"cluster": cluster} if cluster != (1, 1, 1) else {}  # of which the driver then wants the grid
    return LaunchConfig(
        grid=tuple(n // of for n, of in zip(item.grid, cluster, strict=True)),
        **clusters,
        block=item.variant.threads,
        shmem_size=item.variant.shared_bytes,
        programmatic_stream_serialization=item.variant.dependent and item.overlap,
    )


def _arguments(item: Launch) -> list[Any]:
    arguments = []
    for parameter, value in zip(item.variant.parameters, item.values, strict=True):
        if parameter.is_address:
            arguments.append(ctypes.c_int64(0 if value is None else value.data_ptr()))  # type: ignore[union-attr]
        else:
            arguments.append(_SCALARS[parameter.kind](value))
    return arguments


def _kernel(variant: Variant, arch: str, device: int) -> Any:
    with _lock:
        return _load(_Key(variant, arch), device)


class _Key:
    """A variant and its target, equal when their digests are: what the loaded-kernel cache is indexed by."""

    def __init__(self, variant: Variant, arch: str) -> None:
        self.variant, self.arch = variant, arch
        self.digest = digest(variant, arch)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.digest == other.digest


@cache
def _load(key: _Key, device: int) -> Any:
    from cuda.bindings import driver  # type: ignore[import-untyped]
    from cuda.core import Device, ObjectCode

    variant = key.variant
    if variant.shared_bytes > SHARED_BYTES[key.arch]:
        raise KernelLimit(
            f"{variant.name} asks for {variant.shared_bytes} bytes of shared memory",
            f"at most {SHARED_BYTES[key.arch]} on {key.arch}",
            "choose fewer stages or rows per block for this architecture",
        )
    Device(device).set_current()
    code, about = cubin(variant, key.arch)
    kernel = ObjectCode.from_cubin(code, name=variant.name).get_kernel(about["entry"])
    if variant.shared_bytes > _DEFAULT_SHARED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, variant.shared_bytes, kernel.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelLimit(
                f"{variant.name}: the driver refused {variant.shared_bytes} bytes of shared memory ({status})",
                f"what compute capability {torch.cuda.get_device_capability(device)} offers",
                "report the device and driver version",
            )
    return kernel
