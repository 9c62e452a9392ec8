"""The deployment of one `rl` run as data: which processes, where, with what, and what one batch is.

In: a checked RLConfig and a run directory. Out: a `Plan` that `launch/local.py` runs and `--dry-run`
prints. Nothing is started or written while planning; the machine is only looked at (cores, GPUs, free
ports).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.config.deployment import ResumeSection
from stretto.config.engines import HOLD_VAR
from stretto.config.inference import InferenceSection
from stretto.config.load import dump
from stretto.config.orchestrator import EnvSection, EvalSection
from stretto.config.roots import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, TrainerConfig
from stretto.config.section import Section
from stretto.launch.engines import BACKEND_OFFSET, EngineSpec, EnginesPlan, plan_engines

ENGINE_RESTARTS = 3
_PORTS_TRIED = 200
TEACHER_PORT = 8050  # of the teacher's engine where none is given; the first free one from here
_RENDEZVOUS_PORT = 29500  # where trainer ranks find each other; the first free one from here
BFLOAT16_TOLERANCE = 0.1  # nats, of the canary; 0.013 was measured
MOST_THREADS = 16  # of one process; beyond it small matrix products get slower
GPU_HOST_THREADS = 4  # a process whose work is on a GPU only feeds it


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `name` is its role, and its rank where there are several."""

    role: str
    rank: int
    num_ranks: int
    argv: tuple[str, ...]
    env: dict[str, str]
    devices: tuple[str, ...]
    """GPUs it sees, as CUDA names them; empty: the CPU."""
    threads: int
    ports: dict[str, int]
    """Ports it listens on, by what they are for."""
    max_restarts: int = 0
    """Times it is started anew when it ends; the run goes on meanwhile."""
    node: int = 0
    """Which of the plan's hosts it runs on."""

    @property
    def name(self) -> str:
        return self.role if self.num_ranks == 1 else f"{self.role}_{self.rank}"


@dataclass(frozen=True)
class BatchIdentity:
    """What makes one training step: prompts x group = rollouts = ranks x micro batches of packed rows."""

    prompts: int
    group_size: int
    rollouts: int
    ranks: int
    seq_len: int
    fewest_micro_batches: int
    """A rank's, when replies are as short as can be."""
    most_micro_batches: int
    """A rank's, when every rollout fills a row of seq_len tokens."""

    def __str__(self) -> str:
        few, most = self.fewest_micro_batches, self.most_micro_batches
        span = f"{few}" if few == most else f"{few} to {most}"
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        return (
            f"{self.prompts} prompts x group of {self.group_size} = {self.rollouts} rollouts = "
            f"{ranks} x {span} micro batches (rows of up to {self.seq_len} tokens, packed)"
        )


@dataclass(frozen=True)
class Plan:
    """Everything a renderer (local, dry run) needs to run the deployment."""

    run: RunDir
    config: RLConfig
    """The resolved root: ports that moved, the step to resume from and threads are filled in."""
    trainer: TrainerConfig
    orchestrator: OrchestratorConfig
    inference: InferenceConfig | None
    """The section as it was given; `engines` are the processes that come of it."""
    engines: EnginesPlan | None
    evaluation: EvalConfig
    """For the person who wants to evaluate the trained weights as this run did."""
    processes: tuple[ProcessSpec, ...]
    batch: BatchIdentity
    notes: tuple[str, ...]
    """What was decided for the user, one sentence each."""
    hosts: tuple[str, ...] = ()
    """Addresses of its machines; empty: this one alone."""

    def configs(self) -> dict[str, Section]:
        """The resolved configs by verb."""
        all_of_them = {
            "rl": self.config,
            "trainer": self.trainer,
            "orchestrator": self.orchestrator,
            "inference": self.inference,
            "eval": self.evaluation,
        }
        if self.config.teacher_inference is not None:
            all_of_them["teacher"] = self.config.teacher_config()
        if self.engines is not None and self.inference is not None:
            one = {engine.name: section_of(self.inference, engine) for engine in self.engines.engines}
            all_of_them |= one
        return {verb: config for verb, config in all_of_them.items() if config is not None}


def plan(
    cfg: RLConfig, run: RunDir, resume_step: int | None = None, *, ports: PortClaims | None = None
) -> Plan:
    """Place the three processes on this machine; their ports are set aside for as long as `ports` lives.

    Raises: ConfigError for a port given by the user that is taken, and for GPUs that are not there.
    """
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        claims = stack.enter_context(contextlib.closing(PortClaims())) if ports is None else ports
        cfg = _with_free_ports(cfg, claims, notes)
    engines = _local_engines(cfg)
    with contextlib.ExitStack() as stack:
        claims = stack.enter_context(contextlib.closing(PortClaims())) if ports is None else ports
        cfg, engines = _with_engine_ports(cfg, engines, claims, notes)
        rendezvous = _free_port("rendezvous", "127.0.0.1", _RENDEZVOUS_PORT, False, claims)
    trainer_gpus, inference_gpus = _assign_gpus(cfg, engines, notes)
    teacher_gpus = _assign_teacher_gpus(cfg, {*trainer_gpus, *inference_gpus}, notes)
    cfg = _share_gpu_memory(cfg, set(trainer_gpus) & set(inference_gpus), notes)
    cfg = _share_with_teacher(cfg, set(teacher_gpus) & {*trainer_gpus, *inference_gpus}, notes)
    cfg = with_canary_tolerance(cfg)
    threads = _assign_threads(cfg, trainer_gpus, inference_gpus, notes)
    if cfg.teacher_inference is not None:
        threads["teacher"] = _teacher_threads(cfg.teacher_inference, threads, teacher_gpus)
    cfg = _with_threads(cfg, threads)
    engines = _local_engines(cfg)
    if cfg.resume is not None:
        cfg = cfg.model_copy(update={"resume": ResumeSection(step=resume_step)})
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"name": cfg.run_name})})
    processes = _processes(cfg, run, engines, threads, trainer_gpus, inference_gpus, rendezvous)
    if cfg.teacher_inference is not None:
        processes.insert(0, _teacher_process(cfg, run, threads["teacher"], teacher_gpus))
    return Plan(
        run=run,
        config=cfg,
        trainer=cfg.trainer_config(),
        orchestrator=cfg.orchestrator_config(),
        inference=None if cfg.inference is None else cfg.inference_config(),
        engines=engines,
        evaluation=eval_config(cfg, run),
        processes=tuple(processes),
        batch=batch_identity(cfg),
        notes=tuple(notes),
    )


def replaced(section: Any, path: str, value: Any) -> Any:
    """A copy of a config with the value at a dotted path replaced."""
    head, _, rest = path.partition(".")
    return section.model_copy(update={head: replaced(getattr(section, head), rest, value) if rest else value})


# -- ports --


def _with_free_ports(cfg: RLConfig, ports: PortClaims, notes: list[str]) -> RLConfig:
    """A port the user gave must be free; a default one moves to the next free, wherever it is named."""
    for wire in ("control", "rollout_transport", "weight_broadcast"):
        listener = getattr(cfg.orchestrator, wire)
        if not hasattr(listener, "port"):
            continue
        is_given = "port" in listener.model_fields_set
        port = _free_port(f"{wire}.port", listener.host, listener.port, is_given, ports)
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
    port = _free_port("inference.server.port", server.host, server.port, is_given, ports)
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
    port = _free_port("teacher_inference.server.port", server.host, first, is_given, ports)
    if port != first:
        notes.append(f"teacher_inference.server.port is {port}, since {first} is taken on this machine")
    cfg = replaced(cfg, "teacher_inference.server", server.model_copy(update={"port": port}))
    return replaced(cfg, "orchestrator.teacher.base_url", f"http://{reachable(server.host)}:{port}/v1")


def _local_engines(cfg: RLConfig) -> EnginesPlan | None:
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


def _with_engine_ports(
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
            _free_port(f"the port of {engine.name}", host, engine.section.server.port, True, ports)
    engines = _local_engines(cfg)
    assert engines is not None
    urls = [f"{url}/v1" for url in engines.base_urls]
    cfg = replaced(cfg, "orchestrator.client.base_url", urls if len(urls) > 1 else urls[0])
    cfg = replaced(cfg, "orchestrator.client.admin_base_url", [f"{url}/v1" for url in engines.admin_urls])
    return cfg, engines


def _free_port(key: str, host: str, port: int, is_given: bool, ports: PortClaims) -> int:
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


def _assign_gpus(cfg: RLConfig, engines: EnginesPlan | None, notes: list[str]) -> tuple[list[str], list[str]]:
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
    if missing := sorted(index for index in {*trainer_ids, *inference_ids} if index >= len(gpus)):
        message = (
            f"trainer_gpu_ids, inference_gpu_ids or deployment ask for GPU {', '.join(map(str, missing))}, "
            f"but this machine shows {len(gpus)}"
        )
        if not cfg.dry_run:
            raise ConfigError(f"{message}; name others, or set CUDA_VISIBLE_DEVICES.")
        notes.append(message)

    def name(index: int) -> str:
        return gpus[index] if index < len(gpus) else str(index)

    return [name(index) for index in trainer_ids], [name(index) for index in inference_ids]


def _assign_teacher_gpus(cfg: RLConfig, taken: set[str], notes: list[str]) -> list[str]:
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
    if missing := [index for index in ids if index >= len(gpus)]:
        message = (
            f"teacher_gpu_ids or deployment ask for GPU {', '.join(map(str, missing))}, but this machine "
            f"shows {len(gpus)}"
        )
        if not cfg.dry_run:
            raise ConfigError(f"{message}; name others, or set CUDA_VISIBLE_DEVICES.")
        notes.append(message)
    return [gpus[index] if index < len(gpus) else str(index) for index in ids]


def _share_with_teacher(cfg: RLConfig, shared: set[str], notes: list[str]) -> RLConfig:
    """On a GPU with others the teacher takes a quarter of the memory, unless the user said how much."""
    if not shared or "gpu_memory_utilization" in cfg.teacher_inference.model_fields_set:
        return cfg
    notes.append("teacher_inference.gpu_memory_utilization is 0.25, since it shares its GPU")
    cfg = replaced(cfg, "teacher_inference.gpu_memory_utilization", 0.25)
    if cfg.inference is None or "gpu_memory_utilization" in cfg.inference.model_fields_set:
        return cfg
    least = min(cfg.inference.gpu_memory_utilization, 0.5)
    return replaced(cfg, "inference.gpu_memory_utilization", least)


def _share_gpu_memory(cfg: RLConfig, shared: set[str], notes: list[str]) -> RLConfig:
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


def _assign_threads(
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


def _with_threads(cfg: RLConfig, threads: dict[str, int]) -> RLConfig:
    cfg = replaced(cfg, "trainer.num_threads", threads["trainer"])
    return cfg if cfg.inference is None else replaced(cfg, "inference.num_threads", threads["inference"])


def _teacher_threads(section: InferenceSection, threads: dict[str, int], gpus: list[str]) -> int:
    """As many as the policy's engine has: it reads what that one writes."""
    if section.num_threads is not None:
        return section.num_threads
    return GPU_HOST_THREADS if gpus else max(threads["inference"], 1)


# -- processes and batch --


def section_of(cfg: InferenceConfig, engine: EngineSpec) -> InferenceConfig:
    """The config of one engine's process."""
    own = {key: getattr(engine.section, key) for key in type(engine.section).model_fields}
    return cfg.model_copy(update=own)


def _processes(
    cfg: RLConfig,
    run: RunDir,
    engines: EnginesPlan | None,
    threads: dict[str, int],
    trainer_gpus: list[str],
    inference_gpus: list[str],
    rendezvous: int,
) -> list[ProcessSpec]:
    def spec(
        role: str,
        rank: int,
        num_ranks: int,
        gpus: list[str],
        ports: dict[str, int],
        env: dict[str, str],
        config: str | None = None,
    ):
        argv = (sys.executable, "-m", "stretto", role, "@", str(run.config(config or role)))
        env = {**process.thread_env(threads[role]), **process.device_env(gpus), **env}
        restarts = restarts_of(role, num_ranks)
        return ProcessSpec(role, rank, num_ranks, argv, env, tuple(gpus), threads[role], ports, restarts)

    def restarts_of(role: str, num_ranks: int) -> int:
        if role != "inference" or cfg.inference is None:
            return 0
        default = 0 if num_ranks == 1 else ENGINE_RESTARTS
        return default if cfg.inference.max_restarts is None else cfg.inference.max_restarts

    processes = []
    key_env = {}
    if cfg.inference is not None and engines is not None:
        # An engine is let in when it has this run's weights; its own, from before, nobody asked for.
        hold = {HOLD_VAR: "1"}
        gpus = iter(inference_gpus)
        count = len(engines.engines)
        for rank, engine in enumerate(engines.engines):
            own = inference_gpus if count == 1 else list(itertools.islice(gpus, engine.num_gpus))
            ports = {"http": engine.section.server.port}
            env = {**hold, **engine.env}
            processes.append(spec("inference", rank, count, own, ports, env, config=engine.name))
        for role, helpers in (("kv_store", engines.stores), ("router", engines.routers)):
            for rank, helper in enumerate(helpers):
                env = process.thread_env(1) | helper.env
                ports = {"http": helper.port}
                spec_of = (role, rank, len(helpers), helper.argv, env, (), 1, ports, ENGINE_RESTARTS)
                processes.append(ProcessSpec(*spec_of))
        if cfg.inference.api_key is not None:
            key_env = {cfg.orchestrator.client.api_key_var: cfg.inference.api_key}
    teacher = cfg.orchestrator.teacher
    if (
        teacher is not None
        and cfg.teacher_inference is not None
        and cfg.teacher_inference.api_key is not None
    ):
        key_env |= {teacher.api_key_var: cfg.teacher_inference.api_key}
    ports = {"control": cfg.orchestrator.control.port}
    if cfg.orchestrator.rollout_transport.type == "zmq":
        ports["rollouts"] = cfg.orchestrator.rollout_transport.port
    processes.append(spec("orchestrator", 0, 1, [], ports, key_env))
    ranks = cfg.num_train_ranks
    for rank in range(ranks):
        env = {}
        if ranks > 1:
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous)}
        gpus = trainer_gpus if len(trainer_gpus) < ranks else [trainer_gpus[rank]] if trainer_gpus else []
        processes.append(spec("trainer", rank, ranks, gpus, {}, env))
    return processes


def _teacher_process(cfg: RLConfig, run: RunDir, threads: int, gpus: list[str]) -> ProcessSpec:
    """The teacher's engine, which is never given weights."""
    section = cfg.teacher_inference
    assert section is not None
    argv = (sys.executable, "-m", "stretto", "inference", "@", str(run.config("teacher")))
    env = {**process.thread_env(threads), **process.device_env(gpus)}
    ports = {"http": section.server.port}
    return ProcessSpec("teacher", 0, 1, argv, env, tuple(gpus), threads, ports, section.max_restarts or 0)


def eval_config(cfg: RLConfig, run: RunDir) -> EvalConfig:
    """Evaluates this run's newest weights on what the run was evaluated on, with an engine of its own."""
    section = cfg.orchestrator.eval_as_trained() or EvalSection(sampling=cfg.orchestrator.train.sampling)
    engine = cfg.inference or InferenceSection()
    return EvalConfig.model_validate(
        {
            "model": str(run.latest_weights),
            "eval": section.model_dump()
            | {
                "env": [
                    env.model_dump(include=set(EnvSection.model_fields))
                    for env in section.env or cfg.orchestrator.env
                ]
            },
            # The run's own port may be in use by then, by this run or another: a free one is found.
            "inference": engine.model_dump(exclude={"model": True, "api_key": True, "server": {"port"}}),
            "renderer": cfg.orchestrator.renderer,
            "tokenizer": cfg.orchestrator.tokenizer,
            "seq_len": cfg.orchestrator.seq_len,
            "seed": cfg.orchestrator.seed,
            "output_dir": cfg.output_dir,
            "run": {"name": f"{cfg.run_name}-eval"},
        }
    )


def batch_identity(cfg: RLConfig) -> BatchIdentity:
    section, ranks = cfg.orchestrator, cfg.orchestrator.num_train_workers
    most = math.ceil(section.batch_size / ranks)
    # The shortest rollout that is trained: one prompt token and one sampled token.
    fewest = math.ceil(2 * section.batch_size / (ranks * section.seq_len))
    return BatchIdentity(
        prompts=section.batch_size // section.group_size,
        group_size=section.group_size,
        rollouts=section.batch_size,
        ranks=ranks,
        seq_len=section.seq_len,
        fewest_micro_batches=fewest,
        most_micro_batches=most,
    )


# -- printing and writing --


def write(plan: Plan, directory: Path) -> None:
    """Write configs/<verb>.json and plan.json below a directory (the run directory, or its dry_run)."""
    target = RunDir(directory)
    target.configs.mkdir(parents=True, exist_ok=True)
    served = (plan.inference, plan.config.teacher_inference)
    has_key = any(section is not None and section.api_key is not None for section in served)
    for verb, config in plan.configs().items():
        data = dump(config)
        if verb == "eval":
            del data["inference"]["model"]  # another spelling of the root's model
            del data["inference"]["server"]["port"]
        write_json(
            target.config(verb), data, is_secret=has_key and isinstance(config, RLConfig | InferenceConfig)
        )
    write_json(target.plan, as_json(plan))


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plan.json holds it, without secrets."""
    section = plan.config.orchestrator
    secrets = {section.client.api_key_var, section.teacher and section.teacher.api_key_var}
    processes = [dataclasses.asdict(spec) | {"name": spec.name} for spec in plan.processes]
    for spec in processes:
        spec["env"] = {key: "***" if key in secrets else value for key, value in spec["env"].items()}
    return {
        "run": str(plan.run),
        "resume_step": None if plan.config.resume is None else plan.config.resume.step,
        "batch": dataclasses.asdict(plan.batch) | {"text": str(plan.batch)},
        "hosts": list(plan.hosts),
        "processes": processes,
        "notes": list(plan.notes),
    }


def write_json(path: Path, data: dict[str, Any], *, is_secret: bool = False) -> None:
    path.touch(mode=0o600 if is_secret else 0o644)
    path.write_text(json.dumps(data, indent=2) + "\n")


def process_table(processes: Sequence[ProcessSpec], hosts: Sequence[str]) -> str:
    """A line a process; hosts: of several machines."""
    nodes = [f"{node}: {host}" for node, host in enumerate(hosts)] or [""]
    header = ("process", *["node"] * bool(hosts), "threads", "devices", "ports", "command")
    rows = [
        (
            spec.name,
            *[nodes[spec.node]] * bool(hosts),
            str(spec.threads),
            f"GPU {','.join(spec.devices)}" if spec.devices else "CPU",
            " ".join(f"{name}:{port}" for name, port in spec.ports.items()) or "-",
            shlex.join(("python", *spec.argv[1:])),
        )
        for spec in processes
    ]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths[:-1]) + "  " + "-" * 7)
    return "\n".join(lines)


def table(plan: Plan) -> str:
    """The plan as a person reads it."""
    cfg = plan.config
    envs = ", ".join(env.name or env.id for env in cfg.orchestrator.env)
    steps = "until stopped" if cfg.max_steps is None else f"{cfg.max_steps} steps"
    head = [
        f"run      {plan.run}"
        + (f" (resumed from step {cfg.resume.step})" if cfg.resume is not None else ""),
        f"model    {cfg.model.name}" + (" (made from scratch)" if cfg.model.scratch is not None else ""),
        f"trains   {envs}, {steps}, up to {cfg.orchestrator.max_async_level} ahead",
        f"batch    {plan.batch}",
        f"wires    rollouts {cfg.rollout_transport.type}, weights {cfg.weight_broadcast.type}",
        f"machine  {process.num_cores()} CPU cores, {len(process.visible_gpus())} GPUs",
    ]
    if cfg.inference is None:
        urls = cfg.orchestrator.client.base_url
        head.append(f"engines  already running at {urls if isinstance(urls, str) else ', '.join(urls)}")
    return "\n".join(
        [*head, "", process_table(plan.processes, plan.hosts), *(f"note: {note}" for note in plan.notes)]
    )
