"""The engines of frozen models as a plan has them: those of [models.NAME], and that of [teacher_inference]."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from stretto import addons
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims
from stretto.base.secret import Secret
from stretto.check.models import needs_vllm
from stretto.config.root import FrozenModelSection, RLConfig
from stretto.config.section import Section
from stretto.config.sections.distill import MODEL_KEY_VAR, TEACHER_KEY_VAR, FrozenModelPlace
from stretto.config.sections.inference import KEY_VAR, InferenceSection
from stretto.data.model_file import has_own_family, is_classifier
from stretto.launch.plan.beside import EnginesBeside
from stretto.launch.plan.placement import (
    GPU_HOST_THREADS,
    MOST_THREADS,
    check_gpus_exist,
    client_url,
    free_port,
    gpu_names,
    replaced,
    with_free_port,
)
from stretto.launch.plan.processes import ProcessSpec, client_key_env, engine_key_env, stretto_process

MODEL_PORT = 8060  # of the first model's engine if none is given: the first free port from here
TEACHER_PORT = 8050  # of the teacher's engine, likewise
TEACHER = "teacher"


class FrozenEngines(EnginesBeside):
    """The engines that a run starts for frozen models. A role is `teacher`, or `model_` and a name."""

    def sections(self, cfg: RLConfig) -> dict[str, str]:
        teacher = {} if cfg.teacher_inference is None else {TEACHER: "teacher_inference"}
        return teacher | {role_of(name): f"models.{name}" for name, _ in started_models(cfg)}

    def with_engines(self, cfg: RLConfig) -> RLConfig:
        teacher = cfg.teacher_inference
        if teacher is not None and needs_vllm(teacher, teacher.model or cfg.model.name):
            cfg = replaced(cfg, "teacher_inference.engine", "vllm")
        for name, section in started_models(cfg):
            if not section.model:
                continue
            if is_classifier(section.model):
                engine = _check_reward_model(name, section)
            elif needs_vllm(section, section.model):
                engine = "vllm"
            else:
                continue
            cfg = replaced(cfg, "models", dict(cfg.models) | {name: section.model_copy(update={"engine": engine})})
        return cfg

    def with_names(self, cfg: RLConfig) -> RLConfig:
        return _with_servers(cfg, lambda _: ("127.0.0.1", 9))

    def with_ports(self, cfg: RLConfig, ports: PortClaims, notes: list[str]) -> RLConfig:
        if cfg.teacher_inference is not None:
            cfg = with_free_port(cfg, "teacher_inference.server", ports, notes, default=TEACHER_PORT)
            assert cfg.teacher_inference is not None
            cfg = replaced(cfg, "orchestrator.teacher.base_url", client_url(cfg.teacher_inference.server))

        def listen(name: str) -> tuple[str, int]:
            server = cfg.models[name].server
            is_given = "port" in server.model_fields_set
            first = server.port if is_given else MODEL_PORT
            return server.host, free_port(f"models.{name}.server.port", server.host, first, is_given, ports)

        return _with_servers(cfg, listen)

    def with_hosts(self, cfg: RLConfig, hosts: Sequence[str]) -> RLConfig:
        names = list(cfg.models)

        def listen(name: str) -> tuple[str, int]:
            server = cfg.models[name].server
            port = server.port if "port" in server.model_fields_set else MODEL_PORT + names.index(name)
            return hosts[cfg.model_places[name][0]], port

        return _with_servers(cfg, listen)

    def with_gpus(
        self, cfg: RLConfig, taken: set[str], gpus: Sequence[str], notes: list[str]
    ) -> tuple[RLConfig, dict[str, list[str]]]:
        teacher = _teacher_gpus(cfg, taken, gpus, notes)
        models = _model_gpus(cfg, {*taken, *teacher}, gpus)
        return _share_with_teacher(cfg, set(teacher) & taken, notes), {TEACHER: teacher, **models}

    def processes(
        self, cfg: RLConfig, run: RunDir, secret: Secret | None, gpus_of: Mapping[str, list[str]],
        keyed: InferenceSection | None, threads: int,
    ) -> tuple[list[ProcessSpec], dict[str, str]]:  # fmt: skip
        made = models_key(cfg, secret)
        names = reversed([name for name, _ in started_models(cfg)])
        found = [_model_process(cfg, run, name, threads, gpus_of[role_of(name)], made) for name in names]
        section, teacher = with_teacher_key(cfg, keyed, secret), cfg.orchestrator.teacher
        if section is None:
            return found, made
        variable, gpus = None if teacher is None else teacher.api_key_var, gpus_of[TEACHER]
        found.append(_process(TEACHER, run, section, threads, gpus, engine_key_env(section, variable)))
        return found, made if variable is None else client_key_env(section, variable) | made

    def node_processes(
        self, cfg: RLConfig, run: RunDir, secret: Secret | None
    ) -> tuple[list[ProcessSpec], dict[str, str]]:
        made, specs = models_key(cfg, secret), []
        first_node = cfg.num_nodes - cfg.num_model_nodes
        for name, section in started_models(cfg):
            node, first = cfg.model_places[name]
            nodes = section.deployment.num_nodes
            count = section.gpus_with_idle if nodes == 1 else getattr(section.deployment, "gpus_per_node", 0)
            count *= section.device != "cpu" and (cfg.deployment.gpus_per_node or 0) > 0
            gpus = [str(gpu) for gpu in range(first, first + count)]
            spec = _model_process(cfg, run, name, MOST_THREADS, gpus, made)
            for rank in range(nodes):
                own = dataclasses.replace(spec, node=first_node + node + rank)
                if nodes > 1:
                    argv = (*spec.argv, "--node-rank", str(rank))
                    own = dataclasses.replace(own, rank=rank, num_ranks=nodes, argv=argv)
                specs.append(own)
        return specs, made

    def configs(self, cfg: RLConfig, hosts: Sequence[str]) -> dict[str, Section]:
        found: dict[str, Section] = {} if cfg.teacher_inference is None else {TEACHER: cfg.teacher_config()}
        for name, section in started_models(cfg):
            found[role_of(name)] = own = cfg.model_config_of(name)
            if (num_nodes := section.deployment.num_nodes) > 1:
                first = len(hosts) - cfg.num_model_nodes + cfg.model_places[name][0]
                found[role_of(name)] = own.model_copy(update={"hosts": list(hosts[first : first + num_nodes])})
        return found


ENGINES = FrozenEngines()


def role_of(name: str) -> str:
    """The name of a model's process, of its log and its config."""
    return f"model_{name}"


def started_models(cfg: RLConfig) -> Iterator[tuple[str, FrozenModelSection]]:
    """The models whose engines this run starts."""
    return ((name, section) for name, section in cfg.models.items() if section.base_url is None)


# -- addresses --


def _with_servers(cfg: RLConfig, listen: Callable[[str], tuple[str, int]]) -> RLConfig:
    """The root in which the orchestrator has the address of every model, and the name of the variable with its key.

    listen: host and port of a model that the run starts.
    """
    # Without a key of the user, their engines have one that is made from the run's secret (`models_key`).
    made = {} if os.environ.get(TEACHER_KEY_VAR) else {"api_key_var": MODEL_KEY_VAR}
    places, models = dict(cfg.orchestrator.frozen_models), dict(cfg.models)
    for name, section in cfg.models.items():
        asked = {key: value for key, value in section.client.model_dump().items() if value is not None}
        own_name = section.served_model_name or section.model
        known = FrozenModelPlace(base_url=section.base_url, model=own_name, **asked)
        if section.base_url is None:
            host, port = listen(name)
            server = section.server.model_copy(update={"host": host, "port": port})
            models[name] = section.model_copy(update={"server": server})
            own = {} if section.api_key is not None else made
            known = known.model_copy(update={"base_url": client_url(server), "source": source_of(section), **own})
        places[name] = known
    return replaced(replaced(cfg, "models", models), "orchestrator.frozen_models", places)


def source_of(section: FrozenModelSection) -> str:
    """A digest of what decides the replies of engines: their settings but for places, and the files of the model."""
    settings = section.model_dump_json(exclude={"server", "client", "gpu_ids"})
    files = sorted(file for file in Path(section.model or "").glob("*") if section.model and file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(f"{settings}{stats}".encode()).hexdigest()


# -- GPUs and threads --


def _teacher_gpus(cfg: RLConfig, taken: set[str], gpus: Sequence[str], notes: list[str]) -> list[str]:
    """GPUs of the teacher's engine: the ones named, else free ones, else the first ones, shared."""
    engine = cfg.teacher_inference
    if engine is None or engine.device == "cpu":
        return []
    ids = cfg.teacher_gpu_ids
    if ids is None:
        count = cfg.deployment.num_teacher_gpus
        needed = engine.parallel.num_gpus * bool(gpus) if count is None else count
        free = [index for index, gpu in enumerate(gpus) if gpu not in taken]
        ids = free[:needed] if len(free) >= needed else list(range(needed))
    check_gpus_exist("teacher_gpu_ids or deployment", ids, gpus, cfg, notes)
    return gpu_names(ids, gpus)


def _model_gpus(cfg: RLConfig, taken: set[str], gpus: Sequence[str]) -> dict[str, list[str]]:
    """GPUs of each model's engines: the ones named, else free ones; none on a machine without GPUs.

    Raises: ConfigError if there are too few.
    """
    by_role: dict[str, list[str]] = {}
    for name, section in started_models(cfg):
        needed = 0 if section.device == "cpu" or not gpus else section.num_gpus
        if section.gpu_ids is not None:
            by_role[role_of(name)] = gpu_names(section.gpu_ids, gpus)
            continue
        free = [gpu for gpu in gpus if gpu not in taken]
        if len(free) < needed:
            raise ConfigError(
                f"models.{name} takes {needed} GPUs ({section.shape_in_words}), and {len(free)} of this machine's "
                f"{len(gpus)} are free; lower it, name shared ones as models.{name}.gpu_ids, or set "
                f'models.{name}.device = "cpu"'
            )
        by_role[role_of(name)] = free[:needed]
        taken = taken | set(by_role[role_of(name)])
    return by_role


def _share_with_teacher(cfg: RLConfig, shared: set[str], notes: list[str]) -> RLConfig:
    """Give the teacher a quarter of the memory of a GPU it shares, unless the user gave a share."""
    teacher = cfg.teacher_inference
    if not shared or teacher is None or "gpu_memory_utilization" in teacher.model_fields_set:
        return cfg
    notes.append("teacher_inference.gpu_memory_utilization is 0.25, since it shares its GPU")
    cfg = replaced(cfg, "teacher_inference.gpu_memory_utilization", 0.25)
    if cfg.inference is None or "gpu_memory_utilization" in cfg.inference.model_fields_set:
        return cfg
    least = min(cfg.inference.gpu_memory_utilization, 0.5)
    return replaced(cfg, "inference.gpu_memory_utilization", least)


# -- processes and keys --


def _process(
    role: str, run: RunDir, section: InferenceSection, threads: int, gpus: Sequence[str], env: Mapping[str, str]
) -> ProcessSpec:
    """threads: those of an engine of the policy."""
    if section.num_threads is not None:
        threads = section.num_threads
    else:
        threads = GPU_HOST_THREADS if gpus else max(threads, 1)
    ports = {"http": section.server.port}
    return stretto_process(
        role, run, role, gpus, threads, env, ports, verb="inference", max_restarts=section.max_restarts or 0
    )


def _model_process(
    cfg: RLConfig, run: RunDir, name: str, threads: int, gpus: Sequence[str], made: Mapping[str, str]
) -> ProcessSpec:
    """The engines of a model, which have no key but that of their clients. made: `models_key`."""
    section, variable = cfg.models[name], cfg.orchestrator.frozen_models[name].api_key_var
    key = section.api_key or made.get(variable) or os.environ.get(variable)
    return _process(role_of(name), run, section, threads, gpus, {KEY_VAR: key or ""})


def with_teacher_key(cfg: RLConfig, keyed: InferenceSection | None, secret: Secret | None) -> InferenceSection | None:
    """[teacher_inference] with its engine's API key: that of the config or environment, else made from the secret.

    keyed: [inference] with its key, which the teacher has too if clients find both in one variable.
    """
    section, teacher = cfg.teacher_inference, cfg.orchestrator.teacher
    if section is None or teacher is None or secret is None:
        return section
    if section.api_key is not None or os.environ.get(teacher.api_key_var):
        return section
    is_same = keyed is not None and teacher.api_key_var == cfg.orchestrator.client.api_key_var
    key = keyed.api_key if keyed is not None and is_same else secret.text_key("teacher_inference.api_key")
    return section.model_copy(update={"api_key": key})


def models_key(cfg: RLConfig, secret: Secret | None) -> dict[str, str]:
    """The key of the engines that the run starts for [models.NAME], as the orchestrator's environment; {} if none."""
    places = cfg.orchestrator.frozen_models.values()
    if secret is None or all(place.api_key_var != MODEL_KEY_VAR for place in places):
        return {}
    return {MODEL_KEY_VAR: secret.text_key("models.api_key")}


# -- reward models --


def _check_reward_model(name: str, section: FrozenModelSection) -> str:
    """The engine of a reward model.

    Raises: ConfigError for one that stretto does not start.
    """
    key = f"models.{name}"
    addons.check("stretto.inference", "scorer", f"{key}.model = {section.model!r}, a reward model,")
    own = f"start `vllm serve {section.model}` yourself and give its address as {key}.base_url"
    if section.engine == "vllm":
        raise ConfigError(f'{key}.engine = "vllm" does not start a reward model; leave the key out, or {own}')
    if section.model and not has_own_family(section.model):
        raise ConfigError(f"{key}.model: a reward model of a family that stretto does not compute itself; {own}")
    if section.num_gpus > 1 or section.deployment.num_engines > 1:
        raise ConfigError(f"{key}: a reward model is one process, on one GPU or none; leave out what makes several")
    return "embedded"
