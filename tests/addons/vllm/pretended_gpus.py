"""vLLM on GPUs that are not there: its own parser, configuration and choice of devices for a command of ours.

    python pretended_gpus.py < launches > results      one JSON object per line

vLLM's platform for CUDA runs on its CPU build: NVML's answers, three modules of compiled kernels and the questions that
are asked of them when vLLM is imported are made up; everything else is vLLM's. Each launch has a process of its own,
with its environment. It goes on until each worker sets its device: the first call that a GPU would have to answer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import sys
import traceback
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

GIB = 2**30
NUM_GPUS = 8
UUIDS = [f"GPU-{number}0000000-1111-2222-3333-444444444444" for number in range(NUM_GPUS)]
PARTS = {"MIG-a0000000-1111-2222-3333-444444444444": (1, 0), "MIG-b0000000-1111-2222-3333-444444444444": (1, 3)}
"""Parts of GPUs by name: the GPU, and the number of the part in it."""
MODULES = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")
CAPABILITY = (9, 0)


class DeviceIsSet(Exception):
    """A worker would begin to use its device now."""


def visible() -> list[str]:
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(NUM_GPUS))))
    return [name for name in names.split(",") if name]


def pretend_driver() -> None:
    """NVML's answers about a machine with GPUs, and torch's number of those that are visible."""
    from vllm.third_party import pynvml

    def by_name(name: str) -> Any:
        if name in UUIDS:
            return UUIDS.index(name)
        if name in PARTS:
            return PARTS[name]
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def by_index(index: int) -> int:
        if not 0 <= index < NUM_GPUS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def whole(handle: Any) -> int:
        if not isinstance(handle, tuple):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(handle[0])

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: NUM_GPUS,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_name,
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": whole,
        "nvmlDeviceGetIndex": lambda handle: handle[1] if isinstance(handle, tuple) else handle,
        "nvmlDeviceGetUUID": lambda handle: UUIDS[handle],
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: CAPABILITY,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * GIB),
    }
    for name, answer in answers.items():
        assert hasattr(pynvml, name), name
        setattr(pynvml, name, answer)
    torch.cuda._is_compiled = lambda: True
    torch.cuda._device_count_nvml = lambda: len(visible())
    torch.accelerator.device_count = lambda: len(visible())


def pretend_kernels() -> None:
    """The modules of compiled kernels, and what vLLM asks them when it is imported."""
    for name in MODULES:
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    global library  # it ends with its last reference
    library = torch.library.Library("_C", "FRAGMENT")
    scaled = "cutlass_scaled_mm_supports"
    for name in (f"{scaled}_fp8", f"{scaled}_block_fp8", f"{scaled}_fp4", "cutlass_group_gemm_supported"):
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: True, "CompositeExplicitAutograd")


def pretend_triton() -> None:
    """Triton is there: vLLM chooses another model runner without it."""
    import vllm.config.vllm
    import vllm.device_allocator.cumem
    from vllm import triton_utils

    def config(kwargs: Any = None, num_warps: int = 4, num_stages: int = 2, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(kwargs=kwargs or {}, num_warps=num_warps, num_stages=num_stages)

    triton_utils.triton.Config = config
    vllm.config.vllm.HAS_TRITON = True
    vllm.device_allocator.cumem.cumem_available = True


def pretend() -> None:
    pretend_driver()
    pretend_kernels()
    from vllm import platforms
    from vllm.platforms import cuda

    platforms._current_platform = cuda.CudaPlatform()
    pretend_triton()


@functools.cache
def parser() -> Any:
    """vLLM's own, as `vllm serve` has it; building it also loads its plugins, ours among them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def launched(words: list[str]) -> dict[str, Any]:
    """What vLLM makes of a command: which process it starts, its degrees, and the device of each local worker."""
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli import serve
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor import Executor

    args = parser().parse_args(words)
    command = serve.ServeSubcommand()
    command.validate(args)
    started: list[str] = []

    async def run_server(_: Any) -> None:
        started.append("server")

    serve.run_server = run_server
    serve.run_headless = lambda _: started.append("headless")
    serve.run_multi_api_server = lambda _: started.append("several servers")
    command.cmd(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=args.headless
    )
    parallel, drafts = config.parallel_config, config.speculative_config
    return {
        "started": started,
        "executor": Executor.get_class(config).__name__,
        "device": config.device_config.device_type,
        "is_v2": config.use_v2_model_runner,
        "degrees": [
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size,
        ],
        "nodes": parallel.nnodes,
        "head": str(config.model_config.head_dtype),
        "quantization": config.model_config.quantization,
        "cache_dtype": config.cache_config.cache_dtype,
        "sleeps": config.model_config.enable_sleep_mode,
        "share": config.cache_config.gpu_memory_utilization,
        "transfers": config.weight_transfer_config.backend,
        "drafts": None if drafts is None else [drafts.method, drafts.num_speculative_tokens],
        "drafter": _classes_of_drafter(config),
        "workers": list(workers(config)),
    }  # fmt: skip


def workers(config: Any) -> Any:
    """The workers of this process, each until it sets its device: GPU, rank in its engine, our number of it."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    from stretto_vllm.worker import num_workers, worker_index

    chosen: list[int] = []

    def set_device(device: Any) -> None:
        chosen.append(device.index)
        raise DeviceIsSet

    torch.accelerator.set_device_index = set_device
    first = config.parallel_config.data_parallel_rank
    for local in range(config.parallel_config.data_parallel_size_local):
        for rank in range(config.parallel_config.local_world_size):
            own = copy.deepcopy(config)
            parallel = own.parallel_config  # as the process of an engine's core and its executor set it
            if parallel.data_parallel_size > 1:
                parallel.data_parallel_rank_local = local
            parallel.data_parallel_index = first + local
            parallel.rank = parallel.node_rank_within_dp * parallel.local_world_size + rank
            worker = Worker(own, rank, parallel.rank, "tcp://127.0.0.1:1", is_driver_worker=parallel.rank == 0)
            with contextlib.suppress(DeviceIsSet):
                worker.init_device()
            yield {
                "visible": chosen[-1],
                "gpu": current_platform.visible_device_id_to_physical_device_id(chosen[-1]),
                "rank": parallel.rank,
                "index": worker_index(parallel),
                "of": num_workers(parallel),
            }


def _classes_of_drafter(config: Any) -> list[str]:
    """The architecture of the draft model in vLLM's registry."""
    if config.speculative_config is None or (draft := config.speculative_config.draft_model_config) is None:
        return []
    from vllm.model_executor.models import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    return [name for name in draft.architectures if name in supported]


def answer(launch: dict[str, Any]) -> dict[str, Any]:
    from stretto_vllm.patches.devices import find_gpus_by_name

    os.environ.update(launch["env"])
    find_gpus_by_name()  # as our plugin does in a process that begins with this environment
    try:
        return launched(launch["words"])
    except BaseException as error:  # whatever vLLM raises is the result
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}


def main() -> None:
    logging.disable(logging.WARNING)
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM prints, too
    pretend()
    parser()  # what a launch imports is imported once for all of them
    import vllm.entrypoints.cli.serve
    import vllm.v1.executor
    import vllm.v1.worker.gpu_worker  # noqa: F401

    import stretto_vllm.worker  # noqa: F401

    for line in sys.stdin:
        if (child := os.fork()) == 0:
            data = json.dumps(answer(json.loads(line)), default=str).encode() + b"\n"
            while data:
                data = data[os.write(out, data) :]
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
