"""[models.NAME]: frozen models beside the policy, for a user's functions: ports, GPUs and threads of their engines."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stretto import addons
from stretto.base.errors import ConfigError
from stretto.base.ports import PortClaims
from stretto.check.models import needs_vllm
from stretto.config.root import FrozenModelSection, RLConfig
from stretto.config.sections.distill import MODEL_KEY_VAR, TEACHER_KEY_VAR, FrozenModelPlace
from stretto.data.model_file import has_own_family, is_classifier
from stretto.launch.plan.placement import client_url, free_port, gpu_names, replaced

MODEL_PORT = 8060  # of the first model's engine if none is given: the first free port from here


def role_of(name: str) -> str:
    """The name of a model's process, of its log and its config."""
    return f"model_{name}"


def started_models(cfg: RLConfig) -> Iterator[tuple[str, FrozenModelSection]]:
    """The models whose engines this run starts."""
    return ((name, section) for name, section in cfg.models.items() if section.base_url is None)


def with_model_ports(cfg: RLConfig, ports: PortClaims) -> RLConfig:
    """The root with a free port of this machine for each model that the run starts."""

    def listen(name: str) -> tuple[str, int]:
        server = cfg.models[name].server
        is_given = "port" in server.model_fields_set
        first = server.port if is_given else MODEL_PORT
        return server.host, free_port(f"models.{name}.server.port", server.host, first, is_given, ports)

    return _with_servers(cfg, listen)


def with_model_names(cfg: RLConfig) -> RLConfig:
    """The root in which the orchestrator knows every model by name, at addresses where nobody answers."""
    return _with_servers(cfg, lambda _: ("127.0.0.1", 9))


def with_model_hosts(cfg: RLConfig, hosts: Sequence[str]) -> RLConfig:
    """The root with models that listen on nodes of their own.

    hosts: addresses of the nodes, from the first one that has models.
    """
    names = list(cfg.models)

    def listen(name: str) -> tuple[str, int]:
        server = cfg.models[name].server
        port = server.port if "port" in server.model_fields_set else MODEL_PORT + names.index(name)
        return hosts[cfg.model_places[name][0]], port

    return _with_servers(cfg, listen)


def _with_servers(cfg: RLConfig, listen: Callable[[str], tuple[str, int]]) -> RLConfig:
    """The root in which the orchestrator has the address of every model, and the name of the variable with its key.

    listen: host and port of a model that the run starts.
    """
    # Without a key of the user, their engines have one that is made from the run's secret (`processes.models_key`).
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


def num_gpus(section: FrozenModelSection) -> int:
    """GPUs that a model's engines need; 0 on a CPU."""
    if section.device == "cpu" or section.base_url is not None:
        return 0
    return section.num_gpus


def assign_model_gpus(cfg: RLConfig, taken: set[str], gpus: Sequence[str]) -> dict[str, list[str]]:
    """GPUs of each model's engines: the ones named, else free ones; none on a machine without GPUs.

    Raises: ConfigError if there are too few.
    """
    by_model: dict[str, list[str]] = {}
    for name, section in started_models(cfg):
        needed = num_gpus(section) * bool(gpus)
        if section.gpu_ids is not None:
            by_model[name] = gpu_names(section.gpu_ids, gpus)
            continue
        free = [gpu for gpu in gpus if gpu not in taken]
        if len(free) < needed:
            raise ConfigError(
                f"models.{name} takes {needed} GPUs ({section.shape_in_words}), and {len(free)} of this machine's "
                f"{len(gpus)} are free; lower it, name shared ones as models.{name}.gpu_ids, or set "
                f'models.{name}.device = "cpu"'
            )
        by_model[name] = free[:needed]
        taken = taken | set(by_model[name])
    return by_model


def with_chosen_engines(cfg: RLConfig) -> RLConfig:
    """The root in which engines for families that the embedded engine lacks are vLLM's, where `auto` may choose."""
    for key in ("inference", "teacher_inference"):
        section = getattr(cfg, key)
        if section is not None and needs_vllm(section, section.model or cfg.model.name):
            cfg = replaced(cfg, f"{key}.engine", "vllm")
    for name, section in cfg.models.items():
        if section.base_url is not None or not section.model:
            continue
        if is_classifier(section.model):
            engine = _check_reward_model(name, section)
        elif needs_vllm(section, section.model):
            engine = "vllm"
        else:
            continue
        cfg = replaced(cfg, "models", dict(cfg.models) | {name: section.model_copy(update={"engine": engine})})
    return cfg


def _check_reward_model(name: str, section: FrozenModelSection) -> str:
    """The engine of a reward model.

    Raises: ConfigError for one that stretto does not start.
    """
    key = f"models.{name}"
    addons.check("stretto.engines", "scorer", f"{key}.model = {section.model!r}, a reward model,")
    own = f"start `vllm serve {section.model}` yourself and give its address as {key}.base_url"
    if section.engine == "vllm":
        raise ConfigError(f'{key}.engine = "vllm" does not start a reward model; leave the key out, or {own}')
    if section.model and not has_own_family(section.model):
        raise ConfigError(f"{key}.model: a reward model of a family that stretto does not compute itself; {own}")
    if section.num_gpus > 1 or section.deployment.num_engines > 1:
        raise ConfigError(f"{key}: a reward model is one process, on one GPU or none; leave out what makes several")
    return "embedded"
