"""Assigns this machine's ports, GPUs, GPU memory and CPU threads to the processes of a run.

In: a checked RLConfig. Out: a copy with free ports, threads and shares of memory filled in. Each decision made for the
user adds a sentence to `notes`. A value that the user gave is kept or refused, never changed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.ports import PortClaims, in_url
from stretto.base.rundir import JOB_VAR
from stretto.config.root import RLConfig, RunRoot
from stretto.config.sections.inference import ServerSection
from stretto.config.sections.model import dtype_on
from stretto.launch.plan.engines import BACKEND_OFFSET, plan_engines
from stretto.launch.plan.routers import has_router
from stretto.launch.plan.specs import EnginesPlan
from stretto.records.weight_manifest import BFLOAT16_TOLERANCE

Root = TypeVar("Root", bound=RunRoot)

_PORTS_TRIED = 200
PARTS = ("trainer", "inference", "teacher", "critic")
"""Parts of a run whose GPUs are named by `<part>_gpu_ids`, or counted by deployment.num_<part>_gpus."""
MOST_THREADS = 16  # per process; with more, small matrix products get slower
GPU_HOST_THREADS = 4  # a process whose work is on a GPU only feeds it


def replaced(section: Any, path: str, value: Any) -> Any:
    """A copy of a config with the value at a dotted path replaced."""
    head, _, rest = path.partition(".")
    return section.model_copy(update={head: replaced(getattr(section, head), rest, value) if rest else value})


# -- ports --


def with_free_ports(cfg: RLConfig, ports: PortClaims, notes: list[str]) -> RLConfig:
    """Move each default port that is taken to the next free one; a port that the user gave must be free."""
    for wire in ("control", "rollout_transport", "weight_broadcast"):
        if hasattr(getattr(cfg, wire), "port"):
            cfg = with_free_port(cfg, wire, ports, notes)
    if cfg.critic_placement is not None:
        cfg = with_free_port(cfg, "trainer.critic.placement", ports, notes)
    if cfg.inference is None:
        return cfg
    # If the user gave the orchestrator an address, the engine must listen on that port.
    is_given = "base_url" in cfg.orchestrator.client.model_fields_set
    port = cfg.inference.server.port
    cfg = with_free_port(cfg, "inference.server", ports, notes, is_given=is_given)
    assert cfg.inference is not None
    if cfg.inference.server.port == port:
        return cfg
    return replaced(cfg, "orchestrator.client.base_url", client_url(cfg.inference.server))


def with_free_port(
    cfg: Root, path: str, ports: PortClaims, notes: list[str], *, default: int | None = None, is_given: bool = False
) -> Root:  # fmt: skip
    """A root with a free port for the listener at `path`; another one than the default adds a note.

    default: None: that of the section. is_given: the port may not be moved, though the user did not write this key.
    """
    listener: Any = functools.reduce(getattr, path.split("."), cfg)
    is_given = is_given or "port" in listener.model_fields_set
    if is_given and _starts_elsewhere(cfg):
        return cfg
    first = listener.port if is_given or default is None else default
    port = free_port(f"{path}.port", listener.host, first, is_given, ports)
    if port != first and not _starts_elsewhere(cfg):
        notes.append(f"{path}.port is {port}, since {first} is taken on this machine")
    return cfg if port == listener.port else replaced(cfg, f"{path}.port", port)


def _starts_elsewhere(cfg: Any) -> bool:
    """Whether the processes start in a job on other machines, where other ports may be taken than here."""
    is_submitted = any(getattr(cfg, name, None) is not None for name in ("slurm", "ray"))
    return is_submitted and JOB_VAR not in os.environ


def local_engines(cfg: RLConfig) -> EnginesPlan | None:
    """Plan the engines of this machine.

    Raises: ConfigError for a deployment that needs several machines.
    """
    if cfg.inference is None:
        return None
    shape = cfg.inference.deployment
    is_alone = shape.num_nodes == 1 and (shape.type != "disaggregated" or shape.is_local)
    if shape.type == "multi_node" or not is_alone:
        raise ConfigError(
            f'inference.deployment.type = "{shape.type}" needs {shape.num_nodes} nodes, and `rl` starts processes on '
            "this machine only. Give all nodes, the trainer's first, and start the same command on each: "
            "--deployment.type multi_node --deployment.hosts ... ; or try it on this machine: "
            + ("inference.deployment.is_local = true" if shape.type == "disaggregated" else "num_replicas")
        )
    host = client_host(cfg.inference.server.host)
    return plan_engines(cfg.inference, [host], is_cpu=not process.visible_gpus() and not cfg.asks_for_gpus)


def with_engine_ports(
    cfg: RLConfig, engines: EnginesPlan | None, ports: PortClaims
) -> tuple[RLConfig, EnginesPlan | None]:
    """Find free ports for engines behind a router, and set all addresses in the orchestrator's config."""
    if engines is None or cfg.inference is None:
        return cfg, engines
    if len(engines.engines) == 1 and not has_router(cfg.inference):
        return cfg, engines
    host = cfg.inference.server.host
    shape = cfg.inference.deployment
    if shape.type in ("single_node", "groups") and shape.backend_port is None:
        candidates = range(cfg.inference.server.port + BACKEND_OFFSET, 65000)
        are_free = lambda port: all(ports.claim(host, port + i) for i in range(shape.num_engines))
        if (first := next(filter(are_free, candidates), None)) is None:
            raise ConfigError(
                "inference.deployment.backend_port: no range of free ports was found; give its first port"
            )
        cfg = replaced(cfg, "inference.deployment.backend_port", first)
    else:
        for engine in engines.engines:
            free_port(f"the port of {engine.name}", host, engine.section.server.port, True, ports)
    engines = local_engines(cfg)
    assert engines is not None
    return with_engines(cfg, engines), engines


def with_engines(cfg: RLConfig, engines: EnginesPlan) -> RLConfig:
    """The root in which the orchestrator's client has the addresses of these engines."""
    urls, admin = ([f"{url}/v1" for url in each] for each in (engines.base_urls, engines.admin_urls))
    cfg = replaced(cfg, "orchestrator.client.base_url", urls if len(urls) > 1 else urls[0])
    if any(engine.role == "prefill" for engine in engines.engines):
        cfg = replaced(cfg, "orchestrator.client.split_samples", True)
    return replaced(cfg, "orchestrator.client.admin_base_url", admin)


def free_port(key: str, host: str, port: int, is_given: bool, ports: PortClaims) -> int:
    """Claim `port`, or the first free one after it unless the user gave it.

    Raises: ConfigError naming `key` if there is none.
    """
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


def client_host(host: str) -> str:
    """The address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, in_url(host))


def client_url(server: ServerSection) -> str:
    """The base URL at which this machine reaches an engine's server."""
    return f"http://{client_host(server.host)}:{server.port}/v1"


# -- devices and threads --


def planned_gpus(cfg: RLConfig, engines: EnginesPlan | None, notes: list[str]) -> list[str]:
    """This machine's GPUs; in a dry run that asks for more, also the missing ones, with a note."""
    gpus = process.visible_gpus()
    if not cfg.asks_for_gpus:
        return gpus
    models = [each for each in cfg.models.values() if each.base_url is None and each.device != "cpu"]
    ids = [id for ids in (*cfg.gpu_ids, *(each.gpu_ids for each in models)) for id in ids or ()]
    teacher = 0 if cfg.teacher_inference is None else cfg.teacher_inference.parallel.num_gpus
    defaults = (cfg.num_train_ranks, _engine_gpus(cfg, engines), teacher, cfg.num_critic_ranks)
    num_unnamed = sum(each.num_gpus for each in models if each.gpu_ids is None)
    for part, named, count, default in zip(PARTS, cfg.gpu_ids, cfg.gpu_counts, defaults):
        if named is None and not (part == "trainer" and cfg.colocate is not None):
            num_unnamed += default if count is None else count
    total = max(len(set(ids)) + num_unnamed, max(ids, default=-1) + 1)
    if total <= len(gpus):
        return gpus
    missing = sorted({index for index in ids if index >= len(gpus)}) or range(len(gpus), total)
    which = ", ".join(map(str, missing))
    notes.append(
        f"this run asks for GPU {which}, and this machine shows {len(gpus)}: the plan is for one with {total} GPUs"
    )
    return [*gpus, *map(str, range(len(gpus), total))]


def _engine_gpus(cfg: RLConfig, engines: EnginesPlan | None) -> int:
    """Number of GPUs that the engines of this machine need."""
    if engines is None or cfg.inference is None or cfg.inference.device == "cpu":
        return 0
    return sum(engine.num_gpus for engine in engines.engines)


def assign_gpus(
    cfg: RLConfig, engines: EnginesPlan | None, gpus: Sequence[str], notes: list[str]
) -> tuple[list[str], list[str]]:
    """GPUs of trainer and inference: the ones named, else the first for inference and the next for the trainer.

    Raises: ConfigError if engines need more GPUs than there are.
    """
    inference_ids: list[int] = []
    if cfg.inference is not None and cfg.inference.device != "cpu":
        if cfg.inference.device == "cuda" and not gpus:
            raise ConfigError('inference.device = "cuda", but this machine shows no GPU; use "auto" or "cpu".')
        needed = _engine_gpus(cfg, engines) if gpus else 0
        if cfg.deployment.num_infer_gpus is not None:
            needed = cfg.deployment.num_infer_gpus
        if cfg.inference_gpu_ids is None and needed > len(gpus):
            raise ConfigError(
                f"inference takes {needed} GPUs ({cfg.inference.shape_in_words}), and this machine shows {len(gpus)}; "
                "lower a degree of inference.parallel or inference.deployment.num_replicas, or set CUDA_VISIBLE_DEVICES"
            )
        inference_ids = list(range(needed)) if cfg.inference_gpu_ids is None else cfg.inference_gpu_ids
    trainer_ids = cfg.trainer_gpu_ids
    if trainer_ids is None:
        ranks = cfg.num_train_ranks
        count = cfg.deployment.num_train_gpus
        needed = ranks * bool(gpus) if count is None else count
        if cfg.service is not None:  # then the trainer's process computes nothing
            needed = 0
        free = [index for index in range(len(gpus)) if index not in inference_ids]
        if cfg.colocate is not None:
            free = _colocated(inference_ids, needed)
        num_infer = cfg.deployment.num_infer_gpus
        if count and num_infer and len(free) < needed and cfg.inference_gpu_ids is None:
            raise ConfigError(
                f"deployment.num_train_gpus = {count} and num_infer_gpus = {num_infer} need {count + num_infer} GPUs, "
                f"and this machine shows {len(gpus)}; lower them, or name shared ones with trainer_gpu_ids and "
                "inference_gpu_ids"
            )
        trainer_ids = free[:needed] if len(free) >= needed else list(range(needed))
        if (shared := sorted(set(trainer_ids) & set(inference_ids))) and cfg.colocate is None:
            which = ", ".join(map(str, shared))
            notes.append(f"trainer and inference share GPU {which}: this machine shows {len(gpus)} in all")
    keys = "trainer_gpu_ids, inference_gpu_ids or deployment"
    check_gpus_exist(keys, {*trainer_ids, *inference_ids}, gpus, cfg, notes)
    return gpu_names(trainer_ids, gpus), gpu_names(inference_ids, gpus)


def gpu_names(ids: Iterable[int], gpus: Sequence[str]) -> list[str]:
    """CUDA's names of GPUs by index; the index itself for a GPU that this machine does not show."""
    return [gpus[index] if index < len(gpus) else str(index) for index in ids]


def _colocated(engine_gpus: Sequence[int], needed: int) -> list[int]:
    """GPUs of a trainer that shares those of the engines.

    Raises: ConfigError if the trainer needs more or fewer.
    """
    if needed and len(engine_gpus) != needed:
        raise ConfigError(
            f"[colocate]: the trainer takes {needed} GPUs and the engines {len(engine_gpus)}, and they take turns on "
            "the same; make deployment.num_train_gpus (or num_train_workers x cp x tp) equal to the engines' "
            "inference.parallel x num_replicas"
        )
    return list(engine_gpus)


def assign_critic_gpus(cfg: RLConfig, taken: set[str], gpus: Sequence[str], notes: list[str]) -> list[str]:
    """GPUs of a critic on ranks of its own: the ones named, else the first free ones.

    Raises: ConfigError if there are too few.
    """
    ids, needed = cfg.critic_gpu_ids, cfg.num_critic_ranks * bool(gpus)
    if cfg.deployment.num_critic_gpus is not None:
        needed = cfg.deployment.num_critic_gpus * bool(cfg.num_critic_ranks)
    if ids is None:
        free = [index for index, gpu in enumerate(gpus) if gpu not in taken]
        if len(free) < needed:
            raise ConfigError(
                f"the critic takes {needed} GPUs of its own (trainer.critic.placement), and {len(free)} of the "
                f"{len(gpus)} that this machine shows are free; lower num_workers, name shared ones with "
                "critic_gpu_ids, or leave trainer.critic.placement out: then it is on the trainer's ranks"
            )
        ids = free[:needed]
    check_gpus_exist("critic_gpu_ids", ids, gpus, cfg, notes)
    return gpu_names(ids, gpus)


def check_gpus_exist(keys: str, ids: Iterable[int], gpus: Sequence[str], cfg: RLConfig, notes: list[str]) -> None:
    """Check that this machine has the GPUs that these keys name; a dry run only notes missing ones.

    Raises: ConfigError if GPUs are missing and this is not a dry run.
    """
    if missing := sorted(index for index in ids if index >= len(gpus)):
        which = ", ".join(map(str, missing))
        message = f"{keys} ask for GPU {which}, but this machine shows {len(gpus)}"
        if not cfg.dry_run:
            raise ConfigError(f"{message}; leave the key out, name others, or set CUDA_VISIBLE_DEVICES.")
        notes.append(message)


def share_gpu_memory(cfg: RLConfig, shared: set[str], notes: list[str]) -> RLConfig:
    """Give the engine half of the memory of a GPU that also trains, unless the user gave a share."""
    if not shared or cfg.inference is None or "gpu_memory_utilization" in cfg.inference.model_fields_set:
        return cfg
    if cfg.colocate is not None and cfg.colocate.offload_train and cfg.colocate.offload_rollout:
        return cfg
    notes.append("inference.gpu_memory_utilization is 0.5, since the trainer needs the rest of the GPU")
    return replaced(cfg, "inference.gpu_memory_utilization", 0.5)


def with_canary_tolerance(cfg: RLConfig, *, trains_on_gpus: bool, samples_on_gpus: bool) -> RLConfig:
    """Set the canary tolerance if trainer or engine computes in bfloat16, where rounding is no fault."""
    if cfg.inference is None:
        return cfg
    trained = dtype_on(cfg.model.dtype, is_gpu=trains_on_gpus)
    sampled = dtype_on(cfg.inference.dtype, is_gpu=samples_on_gpus)
    is_exact = trained == sampled == "float32"
    if cfg.weight_broadcast.canary_tolerance is not None or is_exact:
        return cfg
    return replaced(cfg, "weight_broadcast.canary_tolerance", BFLOAT16_TOLERANCE)


def assign_threads(
    cfg: RLConfig, trainer_gpus: list[str], inference_gpus: list[str], notes: list[str]
) -> dict[str, int]:
    """CPU threads per process, by role.

    With two cores, engine and trainer get one each; the orchestrator mostly waits and shares them. With more cores the
    orchestrator gets one, and engine and trainer divide the rest. Numbers that the user gave are kept.
    """
    cores = process.num_cores()
    ranks = cfg.num_train_ranks + cfg.num_critic_ranks
    to_divide = cores if cores <= 2 else cores - 1
    for_engine = 0 if cfg.inference is None else max(1, to_divide // 2)
    for_rank = max(1, (to_divide - for_engine) // ranks)
    threads = {
        "orchestrator": 1,
        "trainer": min(for_rank, GPU_HOST_THREADS if trainer_gpus else MOST_THREADS),
        "inference": min(for_engine, GPU_HOST_THREADS if inference_gpus else MOST_THREADS),
    }
    if cfg.service is not None:
        threads["trainer"] = 1
    if cfg.trainer.num_threads is not None:
        threads["trainer"] = cfg.trainer.num_threads
    if cfg.inference is not None and cfg.inference.num_threads is not None:
        threads["inference"] = cfg.inference.num_threads
    threads["critic"] = threads["trainer"]  # so that both placements of a critic compute alike
    total = threads["trainer"] * ranks + threads["inference"]
    if total > max(cores, 2):
        who = "trainer and critic" if cfg.num_critic_ranks else "trainer"
        notes.append(
            f"{who} ({ranks} x {threads['trainer']}) and inference ({threads['inference']}) have {total} "
            f"threads on {cores} cores: expect them to wait for each other"
        )
    return threads


def with_threads(cfg: RLConfig, threads: dict[str, int]) -> RLConfig:
    cfg = replaced(cfg, "trainer.num_threads", threads["trainer"])
    return cfg if cfg.inference is None else replaced(cfg, "inference.num_threads", threads["inference"])
