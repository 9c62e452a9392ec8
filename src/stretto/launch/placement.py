"""What a run's processes get of this machine: free ports, GPUs, threads, and what follows from sharing them.

In: a checked RLConfig. Out: the same with ports that moved, threads and shares of memory filled in. `notes` collects
what was decided for the user, one sentence each. What the user gave stays, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.ports import PortClaims
from stretto.config.inference import InferenceSection
from stretto.config.roots import RLConfig
from stretto.launch.engines import BACKEND_OFFSET, EnginesPlan, plan_engines

_PORTS_TRIED = 200
TEACHER_PORT = 8050  # of the teacher's engine where none is given; the first free one from here
BFLOAT16_TOLERANCE = 0.1  # nats, of the canary; 0.013 was measured
MOST_THREADS = 16  # of one process; beyond it small matrix products get slower
GPU_HOST_THREADS = 4  # a process whose work is on a GPU only feeds it


def replaced(section: Any, path: str, value: Any) -> Any:
    """A copy of a config with the value at a dotted path replaced."""
    head, _, rest = path.partition(".")
    return section.model_copy(update={head: replaced(getattr(section, head), rest, value) if rest else value})


# -- ports --


def with_free_ports(cfg: RLConfig, ports: PortClaims, notes: list[str]) -> RLConfig:
    """A port the user gave must be free; a default one moves to the next free, wherever it is named."""
    for wire in ("control", "rollout_transport", "weight_broadcast"):
        listener = getattr(cfg.orchestrator, wire)
        if not hasattr(listener, "port"):
            continue
        is_given = "port" in listener.model_fields_set
        port = free_port(f"{wire}.port", listener.host, listener.port, is_given, ports)
        if port != listener.port:
            notes.append(f"{wire}.port is {port}, since {listener.port} is taken on this machine")
            for place in (wire, f"orchestrator.{wire}", f"trainer.{wire}"):
                cfg = replaced(cfg, f"{place}.port", port)
    cfg = _with_teacher_port(cfg, ports, notes)
    if cfg.inference is None:
        return cfg
    server, client = cfg.inference.server, cfg.orchestrator.client
    # An address the user gave the orchestrator fixes the port of the engine behind it.
    is_given = "port" in server.model_fields_set or "base_url" in client.model_fields_set
    port = free_port("inference.server.port", server.host, server.port, is_given, ports)
    if port != server.port:
        notes.append(f"inference.server.port is {port}, since {server.port} is taken on this machine")
        cfg = replaced(cfg, "inference.server.port", port)
        cfg = replaced(cfg, "orchestrator.client.base_url", f"http://{reachable(server.host)}:{port}/v1")
    return cfg


def _with_teacher_port(cfg: RLConfig, ports: PortClaims, notes: list[str]) -> RLConfig:
    """A port for the teacher's engine, and the orchestrator is told of it."""
    if cfg.teacher_inference is None:
        return cfg
    server = cfg.teacher_inference.server
    is_given = "port" in server.model_fields_set
    first = server.port if is_given else TEACHER_PORT
    port = free_port("teacher_inference.server.port", server.host, first, is_given, ports)
    if port != first:
        notes.append(f"teacher_inference.server.port is {port}, since {first} is taken on this machine")
    cfg = replaced(cfg, "teacher_inference.server", server.model_copy(update={"port": port}))
    return replaced(cfg, "orchestrator.teacher.base_url", f"http://{reachable(server.host)}:{port}/v1")


def local_engines(cfg: RLConfig) -> EnginesPlan | None:
    """The engines of this machine.

    Raises: ConfigError for a shape that needs several machines.
    """
    if cfg.inference is None:
        return None
    shape = cfg.inference.deployment
    if shape.type == "multi_node" or (shape.type == "disaggregated" and not shape.is_local):
        raise ConfigError(
            f'inference.deployment.type = "{shape.type}" needs {shape.num_nodes} nodes and `rl` starts processes on '
            "this machine alone. Name them all, the trainer's first, and start the same command on each: "
            "--deployment.type multi_node --deployment.hosts ... ; or try the shape out here: "
            + ("inference.deployment.is_local = true" if shape.type == "disaggregated" else "num_replicas")
        )
    host = reachable(cfg.inference.server.host)
    return plan_engines(cfg.inference, [host], is_cpu=not process.visible_gpus())


def with_engine_ports(
    cfg: RLConfig, engines: EnginesPlan | None, ports: PortClaims, notes: list[str]
) -> tuple[RLConfig, EnginesPlan | None]:
    """Engines behind a router get free ports, and the orchestrator is told where everybody is."""
    if engines is None or cfg.inference is None or len(engines.engines) == 1:
        return cfg, engines
    host = cfg.inference.server.host
    shape = cfg.inference.deployment
    if shape.type == "single_node" and shape.backend_port is None:
        first = next(
            (
                port
                for port in range(cfg.inference.server.port + BACKEND_OFFSET, 65000)
                if all(ports.claim(host, port + i) for i in range(shape.num_replicas))
            ),
            None,
        )
        if first is None:
            raise ConfigError("inference.deployment.backend_port: no free ports; give the first of some")
        cfg = replaced(cfg, "inference.deployment.backend_port", first)
    else:
        for engine in engines.engines:
            free_port(f"the port of {engine.name}", host, engine.section.server.port, True, ports)
    engines = local_engines(cfg)
    assert engines is not None
    urls = [f"{url}/v1" for url in engines.base_urls]
    cfg = replaced(cfg, "orchestrator.client.base_url", urls if len(urls) > 1 else urls[0])
    cfg = replaced(cfg, "orchestrator.client.admin_base_url", [f"{url}/v1" for url in engines.admin_urls])
    return cfg, engines


def free_port(key: str, host: str, port: int, is_given: bool, ports: PortClaims) -> int:
    flag = "--" + key.replace("_", "-")
    last = port if is_given else min(port + _PORTS_TRIED, 65535)
    for candidate in range(port, last + 1):
        if ports.claim(host, candidate):
            return candidate
    if is_given:
        raise ConfigError(
            f"{key} = {port} is taken by another process on this machine (`ss -ltnp | grep :{port}` names "
            f"it); stop that process, give another port with {flag}, or leave it out and a free one is found."
        )
    raise ConfigError(f"{key}: no free port between {port} and {last}; give one with {flag}.")


def reachable(host: str) -> str:
    """Under which address a server that listens on `host` is called from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


# -- devices and threads --


def assign_gpus(cfg: RLConfig, engines: EnginesPlan | None, notes: list[str]) -> tuple[list[str], list[str]]:
    """GPUs of trainer and inference: those named, else inference the first ones and the trainer the next."""
    gpus = process.visible_gpus()
    inference_ids: list[int] = []
    if cfg.inference is not None and cfg.inference.device != "cpu":
        if cfg.inference.device == "cuda" and not gpus and not cfg.dry_run:
            raise ConfigError(
                'inference.device = "cuda", but this machine shows no GPU; use "auto" or "cpu".'
            )
        needed = sum(engine.num_gpus for engine in engines.engines) if engines else 0
        wanted = min(needed, len(gpus))
        if cfg.deployment.num_infer_gpus is not None:
            wanted = cfg.deployment.num_infer_gpus
        inference_ids = list(range(wanted)) if cfg.inference_gpu_ids is None else cfg.inference_gpu_ids
    trainer_ids = cfg.trainer_gpu_ids
    if trainer_ids is None:
        ranks = cfg.num_train_ranks
        wanted = (
            cfg.deployment.num_train_gpus if cfg.deployment.num_train_gpus is not None else ranks * bool(gpus)
        )
        free = [index for index in range(len(gpus)) if index not in inference_ids]
        trainer_ids = free[:wanted] if len(free) >= wanted else list(range(wanted))
        if shared := sorted(set(trainer_ids) & set(inference_ids)):
            which = ", ".join(map(str, shared))
            notes.append(f"trainer and inference share GPU {which}: this machine shows {len(gpus)} in all")
    keys = "trainer_gpu_ids, inference_gpu_ids or deployment"
    _check_are_there(keys, {*trainer_ids, *inference_ids}, gpus, cfg, notes)

    def name(index: int) -> str:
        return gpus[index] if index < len(gpus) else str(index)

    return [name(index) for index in trainer_ids], [name(index) for index in inference_ids]


def assign_teacher_gpus(cfg: RLConfig, taken: set[str], notes: list[str]) -> list[str]:
    """GPUs of the teacher's engine: those named, else the first that nobody else has, else the first."""
    engine, gpus = cfg.teacher_inference, process.visible_gpus()
    if engine is None or engine.device == "cpu":
        return []
    ids = cfg.teacher_gpu_ids
    if ids is None:
        wanted = cfg.deployment.num_teacher_gpus
        wanted = min(engine.parallel.tp * engine.parallel.dp, len(gpus)) if wanted is None else wanted
        free = [index for index, gpu in enumerate(gpus) if gpu not in taken]
        ids = free[:wanted] if len(free) >= wanted else list(range(wanted))
    _check_are_there("teacher_gpu_ids or deployment", ids, gpus, cfg, notes)
    return [gpus[index] if index < len(gpus) else str(index) for index in ids]


def _check_are_there(
    keys: str, wanted: Iterable[int], gpus: Sequence[str], cfg: RLConfig, notes: list[str]
) -> None:
    """A note, in a dry run, when GPUs that these keys ask for are missing.

    Raises: ConfigError otherwise.
    """
    if missing := sorted(index for index in wanted if index >= len(gpus)):
        which = ", ".join(map(str, missing))
        message = f"{keys} ask for GPU {which}, but this machine shows {len(gpus)}"
        if not cfg.dry_run:
            raise ConfigError(f"{message}; name others, or set CUDA_VISIBLE_DEVICES.")
        notes.append(message)


def share_with_teacher(cfg: RLConfig, shared: set[str], notes: list[str]) -> RLConfig:
    """On a GPU with others the teacher takes a quarter of the memory, unless the user said how much."""
    if not shared or "gpu_memory_utilization" in cfg.teacher_inference.model_fields_set:
        return cfg
    notes.append("teacher_inference.gpu_memory_utilization is 0.25, since it shares its GPU")
    cfg = replaced(cfg, "teacher_inference.gpu_memory_utilization", 0.25)
    if cfg.inference is None or "gpu_memory_utilization" in cfg.inference.model_fields_set:
        return cfg
    least = min(cfg.inference.gpu_memory_utilization, 0.5)
    return replaced(cfg, "inference.gpu_memory_utilization", least)


def share_gpu_memory(cfg: RLConfig, shared: set[str], notes: list[str]) -> RLConfig:
    """On a GPU that also trains, the engine leaves half of the memory, unless the user said how much."""
    if not shared or cfg.inference is None or "gpu_memory_utilization" in cfg.inference.model_fields_set:
        return cfg
    notes.append("inference.gpu_memory_utilization is 0.5, since the trainer needs the rest of the GPU")
    return replaced(cfg, "inference.gpu_memory_utilization", 0.5)


def with_canary_tolerance(cfg: RLConfig) -> RLConfig:
    """Only here both types of numbers are known: rounding to bfloat16 on either side is no fault."""
    is_exact = cfg.inference is not None and cfg.inference.dtype == cfg.trainer.model.dtype == "float32"
    if cfg.weight_broadcast.canary_tolerance is not None or is_exact or cfg.inference is None:
        return cfg
    for place in ("weight_broadcast", "orchestrator.weight_broadcast", "trainer.weight_broadcast"):
        cfg = replaced(cfg, f"{place}.canary_tolerance", BFLOAT16_TOLERANCE)
    return cfg


def assign_threads(
    cfg: RLConfig, trainer_gpus: list[str], inference_gpus: list[str], notes: list[str]
) -> dict[str, int]:
    """CPU threads of one process of each role.

    Two cores: one each for engine and trainer, and the orchestrator, which mostly waits, shares. More: the
    orchestrator has one to itself, and engine and trainer divide the rest. What the user gave stays.
    """
    cores = process.num_cores()
    ranks = cfg.num_train_ranks
    shared_out = cores if cores <= 2 else cores - 1
    for_engine = 0 if cfg.inference is None else max(1, shared_out // 2)
    for_rank = max(1, (shared_out - for_engine) // ranks)
    threads = {
        "orchestrator": 1,
        "trainer": min(for_rank, GPU_HOST_THREADS if trainer_gpus else MOST_THREADS),
        "inference": min(for_engine, GPU_HOST_THREADS if inference_gpus else MOST_THREADS),
    }
    if cfg.trainer.num_threads is not None:
        threads["trainer"] = cfg.trainer.num_threads
    if cfg.inference is not None and cfg.inference.num_threads is not None:
        threads["inference"] = cfg.inference.num_threads
    total = threads["trainer"] * ranks + threads["inference"]
    if total > max(cores, 2):
        notes.append(
            f"trainer ({ranks} x {threads['trainer']}) and inference ({threads['inference']}) have {total} "
            f"threads on {cores} cores: expect them to wait for each other"
        )
    return threads


def with_threads(cfg: RLConfig, threads: dict[str, int]) -> RLConfig:
    cfg = replaced(cfg, "trainer.num_threads", threads["trainer"])
    return cfg if cfg.inference is None else replaced(cfg, "inference.num_threads", threads["inference"])


def teacher_threads(section: InferenceSection, threads: dict[str, int], gpus: list[str]) -> int:
    """As many as the policy's engine has: it reads what that one writes."""
    if section.num_threads is not None:
        return section.num_threads
    return GPU_HOST_THREADS if gpus else max(threads["inference"], 1)
