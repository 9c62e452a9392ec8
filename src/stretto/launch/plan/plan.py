"""Plans the deployment of one `rl` run: its processes, their devices, threads and ports, and the batch.

In: a checked RLConfig and a run directory. Out: a `LaunchPlan`, which `launch/run/rl.py` runs and `--dry-run` prints.
Planning starts and writes nothing; placement.py looks at this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.base.secret import Secret
from stretto.check.backend import OWN
from stretto.check.devices import check_devices, check_drafts
from stretto.check.engines import all_engines
from stretto.config.load import dump, write_json
from stretto.config.root import EvalConfig, RLConfig
from stretto.config.section import Section
from stretto.config.sections.distill import MODEL_KEY_VAR
from stretto.config.sections.inference import KEY_VAR, InferenceSection
from stretto.config.sections.model import shares_prefixes, why_unshared
from stretto.config.sections.orchestrator import EnvSection, EvalSection
from stretto.data.model_file import find_model_file
from stretto.launch.plan.beside import engines_beside
from stretto.launch.plan.placement import (
    assign_critic_gpus,
    assign_gpus,
    assign_threads,
    free_port,
    local_engines,
    planned_gpus,
    replaced,
    share_gpu_memory,
    with_canary_tolerance,
    with_engine_ports,
    with_free_ports,
    with_threads,
)
from stretto.launch.plan.processes import (
    RENDEZVOUS_PORT,
    ProcessSpec,
    client_key_env,
    engine_key_env,
    engine_process,
    helper_processes,
    orchestrator_process,
    rank_processes,
    section_of,
    with_engine_key,
)
from stretto.launch.plan.routers import with_reachable_host
from stretto.launch.plan.specs import EnginesPlan


@dataclass(frozen=True)
class BatchShape:
    """The size of one training step: prompts x group = rollouts = ranks x micro batches of packed rows."""

    prompts: int
    group_size: int
    """Most rollouts of a prompt: environments may have their own numbers."""
    rollouts: int
    """If each prompt has the most."""
    fewest_rollouts: int
    """If each prompt has the fewest."""
    ranks: int
    row_tokens: int
    fewest_micro_batches: int
    """Per rank, if replies are as short as possible."""
    most_micro_batches: int
    """Per rank, if every rollout fills a row."""
    tokens: int | None = None
    """Tokens with which a batch is complete, even with fewer prompts; None: every batch has `prompts`."""
    shares_prefixes: bool = False
    """Samples that begin alike stand in one row, and what they begin with is computed once."""

    def __str__(self) -> str:
        span = _span(self.fewest_micro_batches, self.most_micro_batches)
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        up_to, ends, packed = "", "", "packed"
        if self.shares_prefixes:
            packed = "packed as trees"
        if self.tokens is not None:
            up_to = "up to "
            ends = f"; a batch ends with the group that brings it to {self.tokens} tokens"
        sizes = _span(self.fewest_rollouts // self.prompts, self.group_size)
        rollouts = _span(self.fewest_rollouts, self.rollouts)
        return (
            f"{up_to}{self.prompts} prompts x group of {sizes} = {rollouts} rollouts = "
            f"{ranks} x {span} micro batches (rows of up to {self.row_tokens} tokens, {packed}){ends}"
        )


def _span(few: int, most: int) -> str:
    return f"{few}" if few == most else f"{few} to {most}"


@dataclass(frozen=True)
class LaunchPlan:
    """What `rl` starts, and a dry run prints."""

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

        Raises: ConfigError if a process is to do what needs a GPU, and has none.
        """
        snapshots, trainers = cfg.trainer.memory_profiler_path, [s for s in processes if s.role == "trainer"]
        is_on_cpu = cfg.slurm is None and not any(spec.devices for spec in trainers)
        is_shared = _packs_prefixes(cfg, is_on_cpu=is_on_cpu and bool(trainers))
        batch = replace(batch_shape(cfg), shares_prefixes=is_shared)
        if snapshots is not None and is_on_cpu:
            raise ConfigError(
                f'trainer.memory_profiler_path = "{snapshots}": torch records the memory of GPUs only, and this '
                "trainer has none; leave it out (`stretto plan` says what a run needs)"
            )
        is_on_gpu = any(spec.devices for spec in processes if spec.role == "inference")
        check_drafts(cfg, is_on_gpu=is_on_gpu)
        on_cpu = {spec.role for spec in processes} - {spec.role for spec in processes if spec.devices}
        sections = engines_beside(cfg).sections(cfg)
        check_devices(cfg, {sections.get(role, role) for role in on_cpu})
        every = (
            *notes,
            *loss_notes(cfg),
            *(note for engine in all_engines() for note in engine.notes(cfg, is_on_gpu=is_on_gpu)),
            *sharing_notes(cfg),
        )
        return cls(run, cfg, engines, tuple(processes), batch, every, tuple(hosts))

    def configs(self) -> dict[str, Section]:
        """The files of RUN/configs by name: `run`, which trainer and orchestrator load too; one per engine; `eval`.

        Engines have files of their own, since their ports, addresses and options of vLLM come from the plan.
        """
        configs: dict[str, Section] = {"run": self.config, "eval": eval_config(self.config, self.run)}
        configs |= engines_beside(self.config).configs(self.config, self.hosts)
        if self.engines is not None:
            served = self.config.inference_config()
            configs |= {engine.name: section_of(served, engine) for engine in self.engines.engines}
        return configs


def loss_notes(cfg: RLConfig) -> Iterator[str]:
    """What a loss does not do, though its section looks as if it did."""
    kl = cfg.trainer.loss.reference_kl
    if kl is not None and kl.estimator == "k1" and not kl.is_unbiased:
        yield (
            'trainer.loss.reference_kl.estimator = "k1" does not hold the policy to the reference: its gradient is '
            "zero on average without is_unbiased; k3 and low_var do"
        )


def _packs_prefixes(cfg: RLConfig, *, is_on_cpu: bool) -> bool:
    """Whether samples that begin alike stand in one row, and count once what they share; is_on_cpu: the trainer is."""
    if cfg.trainer.backend != OWN or cfg.service is not None:
        return False
    return shares_prefixes(cfg.model, find_model_file(cfg.model.name), is_on_cpu=is_on_cpu)


def sharing_notes(cfg: RLConfig) -> Iterator[str]:
    """Why samples are computed one by one though their common beginnings were to be shared."""
    is_asked = cfg.model.shared_prefixes == "tree"
    if is_asked and (reason := why_unshared(cfg.model, find_model_file(cfg.model.name))) is not None:
        yield f'model.shared_prefixes = "tree" shares nothing here, each sample is computed by itself: {reason}'


def plan(
    cfg: RLConfig,
    run: RunDir,
    resume_step: int | None = None,
    *,
    ports: PortClaims | None = None,
    secret: Secret | None = None,
) -> LaunchPlan:
    """Plan the processes of a run on this machine; their ports stay claimed as long as `ports` is open.

    secret: the run's, from which the engines' key is made if the user gave none; None in a dry run.

    Raises: ConfigError if a port given by the user is taken, or GPUs are missing.
    """
    notes: list[str] = []
    beside = engines_beside(cfg)
    if cfg.service is not None:
        cfg = replaced(cfg, "orchestrator.client.base_url", cfg.service.engine_url(cfg.run_name))
    keyed = cfg.inference
    if cfg.inference is not None:
        reached = with_reachable_host(cfg.inference)
        is_open, cfg = reached is not cfg.inference, cfg.model_copy(update={"inference": reached})
        # Engines have a key on one machine too: its other users reach 127.0.0.1.
        keyed, key_notes = with_engine_key(cfg, secret)
        notes += key_notes if is_open else []
    with contextlib.ExitStack() as stack:
        claims = stack.enter_context(contextlib.closing(PortClaims())) if ports is None else ports
        cfg = with_free_ports(cfg, claims, notes)
        cfg = beside.with_ports(cfg, claims, notes)
    engines = local_engines(cfg)
    with contextlib.ExitStack() as stack:
        claims = stack.enter_context(contextlib.closing(PortClaims())) if ports is None else ports
        cfg, engines = with_engine_ports(cfg, engines, claims)
        rendezvous = [
            free_port("rendezvous", "127.0.0.1", RENDEZVOUS_PORT, False, claims)
            for _ in range(1 + bool(cfg.num_critic_ranks))
        ]
    gpus = planned_gpus(cfg, engines, notes)
    trainer_gpus, inference_gpus = assign_gpus(cfg, engines, gpus, notes)
    critic_gpus = assign_critic_gpus(cfg, {*trainer_gpus, *inference_gpus}, gpus, notes)
    taken = {*trainer_gpus, *inference_gpus, *critic_gpus}
    cfg = share_gpu_memory(cfg, {*trainer_gpus, *critic_gpus} & set(inference_gpus), notes)
    cfg, gpus_beside = beside.with_gpus(cfg, taken, gpus, notes)
    cfg = with_canary_tolerance(cfg, trains_on_gpus=bool(trainer_gpus), samples_on_gpus=bool(inference_gpus))
    threads = assign_threads(cfg, trainer_gpus, inference_gpus, notes)
    cfg = with_threads(cfg, threads)
    engines = local_engines(cfg)
    cfg = with_run(cfg, resume_step)
    gpus_of = {"inference": inference_gpus, "trainer": trainer_gpus, "critic": critic_gpus}
    others, client_env = beside.processes(cfg, run, secret, gpus_beside, keyed, threads["inference"])
    processes = [*others, *_processes(cfg, run, engines, gpus_of, rendezvous, keyed, client_env)]
    if cfg.orchestrator.debug == "rollouts":
        processes = [spec for spec in processes if spec.role not in ("trainer", "critic")]
    return LaunchPlan.of(run, cfg, engines, processes, notes=notes)


def with_run(cfg: RLConfig, resume_step: int | None) -> RLConfig:
    """The root with the run's name and the step to resume from filled in."""
    if cfg.resume is not None:
        cfg = replaced(cfg, "resume.step", resume_step)
    return replaced(cfg, "run.name", cfg.run_name)


# -- processes and batch --


def _processes(
    cfg: RLConfig,
    run: RunDir,
    engines: EnginesPlan | None,
    gpus_of: Mapping[str, list[str]],
    rendezvous: Sequence[int],
    keyed: InferenceSection | None,
    client_env: Mapping[str, str],
) -> list[ProcessSpec]:
    """The processes of policy, orchestrator, trainer and critic.

    gpus_of: by role. rendezvous: ports of the trainer's and the critic's ranks. keyed: [inference] with its key.
    client_env: the orchestrator's keys of other models.
    """
    processes = []
    key_env = dict(client_env)
    if cfg.inference is not None and keyed is not None and engines is not None:
        # Routers send an engine nothing until it has this run's weights: it starts with those of the model.
        is_held = cfg.orchestrator.debug is None
        engine_key = engine_key_env(keyed, cfg.orchestrator.client.api_key_var)
        free = iter(gpus_of["inference"])
        for rank, engine in enumerate(engines.engines):
            gpus = list(free if len(engines.engines) == 1 else itertools.islice(free, engine.num_gpus))
            processes.append(
                engine_process(cfg.inference, engines, run, rank, gpus, is_held=is_held, key_env=engine_key)
            )
        processes += helper_processes(engines, router_env=engine_key)
        key_env |= client_key_env(keyed, cfg.orchestrator.client.api_key_var)
    processes.append(orchestrator_process(cfg, run, key_env))
    sizes = {"trainer": cfg.num_train_ranks, "critic": cfg.num_critic_ranks}
    for (role, size), port in zip(sizes.items(), rendezvous):
        names = gpus_of[role]
        by_rank = [names if len(names) < size else names[rank : rank + 1] for rank in range(size)]
        processes += rank_processes(cfg, run, role, by_rank, ["127.0.0.1"], port)
    return processes


ONLY_IN_TRAINING = {"interval", "skip_first_step", "retrigger_on_resume"}
"""Keys of [eval] that say when a run evaluates."""


def eval_config(cfg: RLConfig, run: RunDir) -> EvalConfig:
    """The config of an eval of this run's newest weights, with the run's eval settings and its own engine."""
    section = cfg.orchestrator.eval_as_trained() or EvalSection(sampling=cfg.orchestrator.train.sampling)
    engine = cfg.inference or InferenceSection()
    trained = [env.model_dump(include=set(EnvSection.model_fields)) for env in cfg.orchestrator.env]
    return EvalConfig.model_validate(
        {
            "model": str(run.latest_weights),
            "eval": section.model_dump(include=set(EvalSection.model_fields) - ONLY_IN_TRAINING)
            | {"env": [env.model_dump(exclude={"interval"}) for env in section.env] or trained},
            # Without the run's port, which may be taken by then: the eval takes a free one.
            "inference": engine.model_dump(exclude={"model": True, "api_key": True, "server": {"port"}}),
            "renderer": cfg.orchestrator.renderer.model_dump(exclude_unset=True),
            "tokenizer": cfg.tokenizer,
            "seq_len": cfg.seq_len,
            "seed": cfg.seed,
            "output_dir": cfg.output_dir,
            "run": {"name": f"{cfg.run_name}-eval"},
        }
    )


def batch_shape(cfg: RLConfig) -> BatchShape:
    section, ranks = cfg.orchestrator, cfg.orchestrator.num_train_workers
    prompts = section.batch_size // section.group_size
    rollouts, fewest_rollouts = prompts * section.largest_group, prompts * section.smallest_group
    most = math.ceil(rollouts / ranks)
    # The shortest rollout that is trained: one prompt token and one sampled token.
    fewest = math.ceil(2 * fewest_rollouts / (ranks * cfg.row_tokens))
    if section.token_batch_size is not None:
        fewest = min(fewest, math.ceil(section.token_batch_size / (ranks * cfg.row_tokens)))
    return BatchShape(
        prompts=prompts,
        group_size=section.largest_group,
        rollouts=rollouts,
        fewest_rollouts=fewest_rollouts,
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
            del data["inference"]["model"]  # it repeats the root's model
            del data["inference"]["server"]["port"]
        write_json(target.config(name), data)
    write_json(target.plan, as_json(plan))


def as_json(plan: LaunchPlan) -> dict[str, Any]:
    """The plan as plan.json holds it, without secrets."""
    section = plan.config.orchestrator
    secrets = {KEY_VAR, MODEL_KEY_VAR, section.client.api_key_var, section.teacher and section.teacher.api_key_var}
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
