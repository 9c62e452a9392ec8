"""The deployment of one `rl` run as data: which processes, where, with what, and what one batch is.

In: a checked RLConfig and a run directory. Out: a `Plan` that `launch/local.py` runs and `--dry-run`
prints. Nothing is started or written while planning; the machine is only looked at (placement.py).
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
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.config.deployment import ResumeSection
from stretto.config.engines import HOLD_VAR
from stretto.config.inference import InferenceSection
from stretto.config.load import dump
from stretto.config.orchestrator import EnvSection, EvalSection
from stretto.config.roots import EvalConfig, InferenceConfig, OrchestratorConfig, RLConfig, TrainerConfig
from stretto.config.section import Section
from stretto.launch.engines import EngineSpec, EnginesPlan
from stretto.launch.placement import (
    assign_gpus,
    assign_teacher_gpus,
    assign_threads,
    free_port,
    local_engines,
    share_gpu_memory,
    share_with_teacher,
    teacher_threads,
    with_canary_tolerance,
    with_engine_ports,
    with_free_ports,
    with_threads,
)

ENGINE_RESTARTS = 3
RENDEZVOUS_PORT = 29500  # where trainer ranks find each other; the first free one from here


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

    @classmethod
    def of(
        cls,
        run: RunDir,
        cfg: RLConfig,
        engines: EnginesPlan | None,
        processes: Sequence[ProcessSpec],
        *,
        notes: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> Plan:
        """A plan from what was decided; everybody's own config is a part of the root."""
        return cls(
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
            hosts=tuple(hosts),
        )

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
        cfg = with_free_ports(cfg, claims, notes)
    engines = local_engines(cfg)
    with contextlib.ExitStack() as stack:
        claims = stack.enter_context(contextlib.closing(PortClaims())) if ports is None else ports
        cfg, engines = with_engine_ports(cfg, engines, claims, notes)
        rendezvous = free_port("rendezvous", "127.0.0.1", RENDEZVOUS_PORT, False, claims)
    trainer_gpus, inference_gpus = assign_gpus(cfg, engines, notes)
    teacher_gpus = assign_teacher_gpus(cfg, {*trainer_gpus, *inference_gpus}, notes)
    cfg = share_gpu_memory(cfg, set(trainer_gpus) & set(inference_gpus), notes)
    cfg = share_with_teacher(cfg, set(teacher_gpus) & {*trainer_gpus, *inference_gpus}, notes)
    cfg = with_canary_tolerance(cfg)
    threads = assign_threads(cfg, trainer_gpus, inference_gpus, notes)
    if cfg.teacher_inference is not None:
        threads["teacher"] = teacher_threads(cfg.teacher_inference, threads, teacher_gpus)
    cfg = with_threads(cfg, threads)
    engines = local_engines(cfg)
    if cfg.resume is not None:
        resume = cfg.resume.model_copy(update={"step": resume_step})
        cfg = cfg.model_copy(update={"resume": resume})
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"name": cfg.run_name})})
    processes = _processes(cfg, run, engines, threads, trainer_gpus, inference_gpus, rendezvous)
    if cfg.teacher_inference is not None:
        processes.insert(0, _teacher_process(cfg, run, threads["teacher"], teacher_gpus))
    return Plan.of(run, cfg, engines, processes, notes=notes)


# -- processes and batch --


def rank_env(rank: int, local_rank: int, num_ranks: int, host: str, port: int) -> dict[str, str]:
    """What torch.distributed reads of a trainer rank's environment; nothing where it is alone."""
    if num_ranks == 1:
        return {}
    env = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(num_ranks)}
    return env | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


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
        env = rank_env(rank, rank, ranks, "127.0.0.1", rendezvous)
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
    trained = [env.model_dump(include=set(EnvSection.model_fields)) for env in cfg.orchestrator.env]
    return EvalConfig.model_validate(
        {
            "model": str(run.latest_weights),
            "eval": section.model_dump(exclude={"interval", "skip_first_step", "retrigger_on_resume"})
            | {"env": [env.model_dump(exclude={"interval"}) for env in section.env] or trained},
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


def resumed(section: ResumeSection) -> str:
    """Where a run goes on, in words; the step has been found."""
    return f"resumed from step {section.step}" + (f" of {section.dir}" if section.dir is not None else "")


def table(plan: Plan) -> str:
    """The plan as a person reads it."""
    cfg = plan.config
    envs = ", ".join(env.name or env.id for env in cfg.orchestrator.env)
    steps = "until stopped" if cfg.max_steps is None else f"{cfg.max_steps} steps"
    head = [
        f"run      {plan.run}" + (f" ({resumed(cfg.resume)})" if cfg.resume is not None else ""),
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
