"""Names of GPUs in CUDA_VISIBLE_DEVICES that vLLM 0.32 does not read, or takes for other GPUs.

CUDA takes the first letters of a GPU's name (GPU-...), and names of parts of GPUs (MIG-...). vLLM asks the driver for
the number of the GPU with this name: it needs the whole name, and for a part it gets the number of the part in its GPU,
which it then takes for that of a GPU.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

MIG_OF_GPU = "MIG-GPU-"
"""Older drivers name parts so: MIG-GPU-<the GPU's name>/<instance>/<part>."""


def find_gpus_by_name() -> None:
    """Have vLLM find these GPUs; called in every vLLM process, before it asks for a GPU's kind."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if "GPU-" not in names and "MIG-" not in names:
        return
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        type(current_platform).device_control_id_to_physical_device_id = staticmethod(_number_of)


def _number_of(name: str) -> int:
    """The number that the driver gives to the GPU with this name, or of which the part with this name is one."""
    from vllm.platforms.cuda import pynvml

    name = name.strip()
    if name.isdecimal():
        return int(name)
    if name.startswith(MIG_OF_GPU):
        name = name.removeprefix("MIG-").partition("/")[0]
    pynvml.nvmlInit()
    try:
        for number in range(pynvml.nvmlDeviceGetCount()):
            whole = _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(number)))
            if whole.startswith(name):
                return number
        with contextlib.suppress(pynvml.NVMLError):
            part = pynvml.nvmlDeviceGetHandleByUUID(name)
            return int(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)))
    finally:
        pynvml.nvmlShutdown()
    raise RuntimeError(f"CUDA_VISIBLE_DEVICES: this machine has no GPU {name}; `nvidia-smi -L` lists them")


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
