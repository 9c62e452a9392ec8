"""Plans the deployment of one `rl` run: its processes, their devices, threads and ports, and the batch.

In: a checked RLConfig and a run directory. Out: a `LaunchPlan`, which `launch/run/rl.py` runs and `--dry-run` prints.
Planning starts and writes nothing; placement.py looks at this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.base.secret import Secret
from stretto.config.load import dump, write_json
from stretto.config.root import EvalConfig, FrozenModelSection, InferenceConfig, RLConfig
from stretto.config.section import Section
from stretto.config.sections.engines import HOLD_VAR
from stretto.config.sections.inference import KEY_VAR, InferenceSection
from stretto.config.sections.orchestrator import EnvSection, EvalSection
from stretto.launch.plan.models import (
    assign_model_gpus,
    model_threads,
    role_of,
    started_models,
    with_model_ports,
)
from stretto.launch.plan.placement import (
    assign_critic_gpus,
    assign_gpus,
    assign_teacher_gpus,
    assign_threads,
    free_port,
    local_engines,
    planned_gpus,
    replaced,
    share_gpu_memory,
    share_with_teacher,
    teacher_threads,
    with_canary_tolerance,
    with_engine_ports,
    with_free_ports,
    with_threads,
)
from stretto.launch.plan.routers import with_reachable_host
from stretto.launch.plan.specs import EngineSpec, EnginesPlan

ENGINE_RESTARTS = 3
RENDEZVOUS_PORT = 29500  # where trainer ranks find each other; the first free one from here


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `name` is its role, with its rank if there are several."""

    role: str
    rank: int
    num_ranks: int
    argv: tuple[str, ...]
    env: dict[str, str]
    devices: tuple[str, ...]
    """CUDA names of the GPUs that it sees; empty: CPU only."""
    threads: int
    ports: dict[str, int]
    """Ports that it listens on, by purpose."""
    max_restarts: int = 0
    """How often it is started anew when it ends; the run goes on meanwhile."""
    node: int = 0
    """Which of the plan's hosts it runs on."""
    waits_for_devices: bool = False
    """Whether it is started when the engines, which have its devices, sleep."""

    @property
    def name(self) -> str:
        return self.role if self.num_ranks == 1 else f"{self.role}_{self.rank}"


@dataclass(frozen=True)
class BatchShape:
    """The size of one training step: prompts x group = rollouts = ranks x micro batches of packed rows."""

    prompts: int
    group_size: int
    rollouts: int
    ranks: int
    row_tokens: int
    fewest_micro_batches: int
    """Per rank, if replies are as short as possible."""
    most_micro_batches: int
    """Per rank, if every rollout fills a row."""
    tokens: int | None = None
    """Tokens with which a batch is complete before it has so many prompts; None: every batch has them."""

    def __str__(self) -> str:
        few, most = self.fewest_micro_batches, self.most_micro_batches
        span = f"{few}" if few == most else f"{few} to {most}"
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        most_of_all, ends = "", ""
        if self.tokens is not None:
            most_of_all, ends = (
                "up to ",
                f"; a batch ends with the group that brings it to {self.tokens} tokens",
            )
        return (
            f"{most_of_all}{self.prompts} prompts x group of {self.group_size} = {self.rollouts} rollouts = "
            f"{ranks} x {span} micro batches (rows of up to {self.row_tokens} tokens, packed){ends}"
        )


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that `rl` needs to start the run, and a dry run to print it."""

    run: RunDir
    config: RLConfig
    """The resolved root: ports, threads and the step to resume from are filled in."""
    engines: EnginesPlan | None
    processes: tuple[ProcessSpec, ...]
    batch: BatchShape
    notes: tuple[str, ...]
    """What was decided for the user, one sentence each."""
    hosts: tuple[str, ...] = ()
    """Addresses of its machines; empty: this machine only."""

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
    ) -> LaunchPlan:
        """Build a plan from a resolved root.

        Raises: ConfigError for memory of GPUs that is to be recorded where the trainer has none.
        """
        batch = batch_shape(cfg)
        snapshots, trainers = cfg.trainer.memory_profiler_path, [s for s in processes if s.role == "trainer"]
        if snapshots is not None and cfg.slurm is None and not any(spec.devices for spec in trainers):
            raise ConfigError(
                f'trainer.memory_profiler_path = "{snapshots}": torch records the memory of GPUs only, and this '
                "trainer has none; leave it out (`stretto plan` says what a run needs)"
            )
        return cls(run, cfg, engines, tuple(processes), batch, tuple(notes), tuple(hosts))

    def configs(self) -> dict[str, Section]:
        """The files of RUN/configs by name: `run`, which trainer and orchestrator load too; one per engine; `eval`.

        Engines have files of their own, since their ports, addresses and options of vLLM come from the plan.
        """
        found: dict[str, Section] = {"run": self.config, "eval": eval_config(self.config, self.run)}
        if self.config.teacher_inference is not None:
            found["teacher"] = self.config.teacher_config()
        for name, section in started_models(self.config):
            found[role_of(name)] = own = self.config.model_config_of(name)
            if (num_nodes := section.deployment.num_nodes) > 1:
                first = len(self.hosts) - self.config.num_model_nodes + self.config.model_places[name][0]
                hosts = list(self.hosts[first : first + num_nodes])
                found[role_of(name)] = own.model_copy(update={"hosts": hosts})
        if self.engines is not None:
            section = self.config.inference_config()
            found |= {engine.name: section_of(section, engine) for engine in self.engines.engines}
        return found


def plan(
    cfg: RLConfig,
    run: RunDir,
    resume_step: int | None = None,
    *,
    ports: PortClaims | None = None,
    secret: Secret | None = None,
) -> LaunchPlan:
    """Plan the processes of a run on this machine; their ports stay claimed as long as `ports` is open.

    secret: the run's, from which a key is made for engines that a router on another machine reaches.

    Raises: ConfigError if a port given by the user is taken, or GPUs are missing.
    """
    notes: list[str] = []
    if cfg.service is not None:
        cfg = replaced(cfg, "orchestrator.client.base_url", cfg.service.engine_url(cfg.run_name))
    keyed = cfg.inference
    if cfg.inference is not None and (reached := with_reachable_host(cfg.inference)) is not cfg.inference:
        cfg = cfg.model_copy(update={"inference": reached})
        keyed, notes = with_engine_key(cfg, secret)
    with contextlib.ExitStack() as stack:
        claims = stack.enter_context(contextlib.closing(PortClaims())) if ports is None else ports
        cfg = with_free_ports(cfg, claims, notes)
        cfg = with_model_ports(cfg, claims, notes)
    engines = local_engines(cfg)
    with contextlib.ExitStack() as stack:
        claims = stack.enter_context(contextlib.closing(PortClaims())) if ports is None else ports
        cfg, engines = with_engine_ports(cfg, engines, claims, notes)
        rendezvous = [
            free_port("rendezvous", "127.0.0.1", RENDEZVOUS_PORT, False, claims)
            for _ in range(1 + bool(cfg.num_critic_ranks))
        ]
    gpus = planned_gpus(cfg, engines, notes)
    trainer_gpus, inference_gpus = assign_gpus(cfg, engines, gpus, notes)
    critic_gpus = assign_critic_gpus(cfg, {*trainer_gpus, *inference_gpus}, gpus, notes)
    taken = {*trainer_gpus, *inference_gpus, *critic_gpus}
    teacher_gpus = assign_teacher_gpus(cfg, taken, gpus, notes)
    model_gpus = assign_model_gpus(cfg, {*taken, *teacher_gpus}, gpus)
    cfg = share_gpu_memory(cfg, {*trainer_gpus, *critic_gpus} & set(inference_gpus), notes)
    cfg = share_with_teacher(cfg, set(teacher_gpus) & taken, notes)
    cfg = with_canary_tolerance(cfg, trains_on_gpus=bool(trainer_gpus), samples_on_gpus=bool(inference_gpus))
    threads = assign_threads(cfg, trainer_gpus, inference_gpus, notes)
    if cfg.teacher_inference is not None:
        threads["teacher"] = teacher_threads(cfg.teacher_inference, threads, teacher_gpus)
    cfg = with_threads(cfg, threads)
    engines = local_engines(cfg)
    if cfg.resume is not None:
        resume = cfg.resume.model_copy(update={"step": resume_step})
        cfg = cfg.model_copy(update={"resume": resume})
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"name": cfg.run_name})})
    gpus_of = {"inference": inference_gpus, "trainer": trainer_gpus, "critic": critic_gpus}
    processes = _processes(cfg, run, engines, threads, gpus_of, rendezvous, keyed)
    if cfg.teacher_inference is not None:
        processes.insert(0, _teacher_process(cfg, run, threads["teacher"], teacher_gpus))
    if cfg.orchestrator.debug == "rollouts":
        processes = [spec for spec in processes if spec.role not in ("trainer", "critic")]
    for name, section in started_models(cfg):
        own = model_gpus[name]
        processes.insert(0, model_process(run, name, section, model_threads(section, threads, own), own))
    return LaunchPlan.of(run, cfg, engines, processes, notes=notes)


# -- processes and batch --


def rank_env(rank: int, local_rank: int, num_ranks: int, host: str, port: int) -> dict[str, str]:
    """The environment variables that torch.distributed reads; none for a single rank."""
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
    gpus_of: Mapping[str, list[str]],
    rendezvous: Sequence[int],
    keyed: InferenceSection | None,
) -> list[ProcessSpec]:
    """gpus_of: by role. rendezvous: ports of the trainer's and the critic's ranks. keyed: [inference] with its key."""

    spec = partial(_spec, cfg, run, threads)
    processes = []
    key_env = {}
    if cfg.inference is not None and keyed is not None and engines is not None:
        # Routers send an engine nothing until it has this run's weights: it starts with those of the model.
        hold = {HOLD_VAR: "1"} if cfg.orchestrator.debug is None else {}
        engine_key = engine_key_env(keyed, cfg.orchestrator.client.api_key_var)
        inference_gpus = gpus_of["inference"]
        gpus = iter(inference_gpus)
        count = len(engines.engines)
        for rank, engine in enumerate(engines.engines):
            own = inference_gpus if count == 1 else list(itertools.islice(gpus, engine.num_gpus))
            ports = {"http": engine.section.server.port}
            env = {**hold, **engine.env, **engine_key}
            processes.append(spec("inference", rank, count, own, ports, env, config=engine.name))
        processes += helper_processes(engines, router_env=engine_key)
        key_env |= client_key_env(keyed, cfg.orchestrator.client.api_key_var)
    if cfg.orchestrator.teacher is not None and cfg.teacher_inference is not None:
        variable = cfg.orchestrator.teacher.api_key_var
        key_env |= client_key_env(cfg.teacher_inference, variable)
    ports = {"control": cfg.control.port}
    if cfg.rollout_transport.type == "zmq":
        ports["rollouts"] = cfg.rollout_transport.port
    processes.append(spec("orchestrator", 0, 1, [], ports, key_env))
    for role, ranks, port in zip(
        ("trainer", "critic"), (cfg.num_train_ranks, cfg.num_critic_ranks), rendezvous
    ):
        for rank in range(ranks):
            env, names = rank_env(rank, rank, ranks, "127.0.0.1", port), gpus_of[role]
            own = names if len(names) < ranks else [names[rank]] if names else []
            ports = {}
            if role == "trainer" and rank == 0 and cfg.critic_placement is not None:
                ports["critic"] = cfg.critic_placement.port
            waits = role == "trainer" and cfg.trainer_waits_for_devices
            rank_spec = spec(role, rank, ranks, own, ports, env)
            processes.append(dataclasses.replace(rank_spec, waits_for_devices=waits))
    return processes


def _spec(
    cfg: RLConfig,
    run: RunDir,
    threads: Mapping[str, int],
    role: str,
    rank: int,
    num_ranks: int,
    gpus: Sequence[str],
    ports: dict[str, int],
    env: Mapping[str, str],
    config: str = "run",
) -> ProcessSpec:
    """One process of `num_ranks` of its role, which loads this config of the run; threads: by role."""
    argv = (sys.executable, "-m", "stretto", role, "@", str(run.config(config)))
    env = {**process.thread_env(threads[role]), **process.device_env(gpus), **env}
    restarts = 0
    if role == "inference" and cfg.inference is not None:
        default = 0 if num_ranks == 1 else ENGINE_RESTARTS
        restarts = default if cfg.inference.max_restarts is None else cfg.inference.max_restarts
    return ProcessSpec(role, rank, num_ranks, argv, env, tuple(gpus), threads[role], ports, restarts)


def helper_processes(
    engines: EnginesPlan, first_node: int = 0, router_env: Mapping[str, str] = MappingProxyType({})
) -> list[ProcessSpec]:
    """Cache stores, routers and registrars as processes.

    first_node: the number of their node 0. router_env: the engines' key, which routers ask for too.
    """
    roles = {"kv_store": engines.stores, "router": engines.routers, "registrar": engines.registrars}
    specs = []
    for role, helpers in roles.items():
        for rank, helper in enumerate(helpers):
            env = process.thread_env(1) | helper.env | ({} if role == "kv_store" else dict(router_env))
            ports = {} if helper.port is None else {"http": helper.port}
            spec = ProcessSpec(role, rank, len(helpers), helper.argv, env, (), 1, ports, ENGINE_RESTARTS)
            specs.append(dataclasses.replace(spec, node=first_node + helper.node))
    return specs


def client_key_env(section: InferenceSection, client_var: str, variable: str | None = None) -> dict[str, str]:
    """The engine's API key for its clients, as an environment: from the config, else from client_var; {} if none.

    variable: under which name; None: client_var.
    """
    key = section.api_key or os.environ.get(client_var)
    return {variable or client_var: key} if key else {}


def engine_key_env(section: InferenceSection, client_var: str | None) -> dict[str, str]:
    """The environment in which an engine finds the key that its clients send, and no other key.

    client_var: the variable that its clients read; None if it has no clients.
    """
    others = {} if client_var == KEY_VAR else {KEY_VAR: ""}
    return others | ({} if client_var is None else client_key_env(section, client_var, KEY_VAR))


def with_engine_key(cfg: RLConfig, secret: Secret | None) -> tuple[InferenceSection | None, list[str]]:
    """[inference] with the API key of engines that other hosts reach; also a note that says where it comes from.

    First choice is the config, then the environment; else every node makes the same key from the run's secret. That
    key is given to processes in their environment, and the configs that are written do not have it.
    """
    section = cfg.inference
    if section is None or section.api_key is not None:
        return section, []
    if os.environ.get(variable := cfg.orchestrator.client.api_key_var):
        return section, [f"the engines' key is that of {variable}: it must be set on every node"]
    if secret is not None:
        section = section.model_copy(update={"api_key": secret.text_key("inference.api_key")})
    return section, [
        "inference.api_key is made from the run's secret: engines answer the run's own processes alone"
    ]


def _teacher_process(cfg: RLConfig, run: RunDir, threads: int, gpus: list[str]) -> ProcessSpec:
    """The teacher's engine; it never gets new weights."""
    section = cfg.teacher_inference
    assert section is not None
    argv = (sys.executable, "-m", "stretto", "inference", "@", str(run.config("teacher")))
    env = {**process.thread_env(threads), **process.device_env(gpus)}
    teacher = cfg.orchestrator.teacher
    env |= engine_key_env(section, None if teacher is None else teacher.api_key_var)
    ports = {"http": section.server.port}
    return ProcessSpec("teacher", 0, 1, argv, env, tuple(gpus), threads, ports, section.max_restarts or 0)


def model_process(
    run: RunDir, name: str, section: FrozenModelSection, threads: int, gpus: list[str]
) -> ProcessSpec:
    """The engines of a frozen model; they never get new weights."""
    role = role_of(name)
    argv = (sys.executable, "-m", "stretto", "inference", "@", str(run.config(role)))
    env = {**process.thread_env(threads), **process.device_env(gpus)}
    ports = {"http": section.server.port}
    return ProcessSpec(role, 0, 1, argv, env, tuple(gpus), threads, ports, section.max_restarts or 0)


def eval_config(cfg: RLConfig, run: RunDir) -> EvalConfig:
    """The config of an eval of this run's newest weights, with the run's eval settings and its own engine."""
    section = cfg.orchestrator.eval_as_trained() or EvalSection(sampling=cfg.orchestrator.train.sampling)
    engine = cfg.inference or InferenceSection()
    trained = [env.model_dump(include=set(EnvSection.model_fields)) for env in cfg.orchestrator.env]
    return EvalConfig.model_validate(
        {
            "model": str(run.latest_weights),
            "eval": section.model_dump(exclude={"interval", "skip_first_step", "retrigger_on_resume"})
            | {"env": [env.model_dump(exclude={"interval"}) for env in section.env] or trained},
            # Without the run's port, which may be in use then: a free one is found.
            "inference": engine.model_dump(exclude={"model": True, "api_key": True, "server": {"port"}}),
            "renderer": cfg.orchestrator.renderer,
            "tokenizer": cfg.tokenizer,
            "seq_len": cfg.seq_len,
            "seed": cfg.seed,
            "output_dir": cfg.output_dir,
            "run": {"name": f"{cfg.run_name}-eval"},
        }
    )


def batch_shape(cfg: RLConfig) -> BatchShape:
    section, ranks = cfg.orchestrator, cfg.orchestrator.num_train_workers
    most = math.ceil(section.batch_size / ranks)
    # The shortest rollout that is trained: one prompt token and one sampled token.
    fewest = math.ceil(2 * section.batch_size / (ranks * cfg.row_tokens))
    if section.token_batch_size is not None:
        fewest = min(fewest, math.ceil(section.token_batch_size / (ranks * cfg.row_tokens)))
    return BatchShape(
        prompts=section.batch_size // section.group_size,
        group_size=section.group_size,
        rollouts=section.batch_size,
        ranks=ranks,
        row_tokens=cfg.row_tokens,
        fewest_micro_batches=fewest,
        most_micro_batches=most,
        tokens=section.token_batch_size,
    )


# -- printing and writing --


def write(plan: LaunchPlan, directory: Path) -> None:
    """Write configs/*.json and plan.json below a directory (the run directory, or its dry_run)."""
    target = RunDir(directory)
    target.configs.mkdir(parents=True, exist_ok=True)
    for name, config in plan.configs().items():
        data = dump(config)
        if name == "eval":
            del data["inference"]["model"]  # another spelling of the root's model
            del data["inference"]["server"]["port"]
        write_json(target.config(name), data)
    write_json(target.plan, as_json(plan))


def as_json(plan: LaunchPlan) -> dict[str, Any]:
    """The plan as plan.json holds it, without secrets."""
    section = plan.config.orchestrator
    secrets = {KEY_VAR, section.client.api_key_var, section.teacher and section.teacher.api_key_var}
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
