"""[models.NAME]: frozen models beside the policy, for a user's functions: ports, GPUs and threads of their engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.base.errors import ConfigError
from stretto.base.ports import PortClaims
from stretto.config.root import FrozenModelSection, RLConfig
from stretto.config.rules.engine import shape_of
from stretto.config.sections.distill import TeacherSection
from stretto.launch.plan.placement import GPU_HOST_THREADS, client_host, free_port, replaced

MODEL_PORT = 8060  # of the first model's engine if none is given: the first free one from here


def role_of(name: str) -> str:
    """The name of a model's process, of its log and its config."""
    return f"model_{name}"


def started_models(cfg: RLConfig) -> Iterator[tuple[str, FrozenModelSection]]:
    """The models whose engines this run starts."""
    return ((name, section) for name, section in cfg.models.items() if section.base_url is None)


def with_model_ports(cfg: RLConfig, ports: PortClaims, notes: list[str]) -> RLConfig:
    """Find ports for the models' engines, and tell the orchestrator where every model is."""
    places = dict(cfg.orchestrator.frozen_models)
    models = dict(cfg.models)
    for name, section in cfg.models.items():
        url = section.base_url
        if url is None:
            key, is_given = f"models.{name}.server.port", "port" in section.server.model_fields_set
            first = section.server.port if is_given else MODEL_PORT
            port = free_port(key, section.server.host, first, is_given, ports)
            if port != first and is_given:
                notes.append(f"{key} is {port}, since {first} is taken on this machine")
            server = section.server.model_copy(update={"port": port})
            models[name] = section.model_copy(update={"server": server})
            url = f"http://{client_host(server.host)}:{port}/v1"
        places[name] = TeacherSection(base_url=url, model=section.served_model_name or section.model)
    cfg = cfg.model_copy(update={"models": models})
    return replaced(cfg, "orchestrator.frozen_models", places)


def with_model_hosts(cfg: RLConfig, hosts: Sequence[str]) -> RLConfig:
    """Let models on nodes of their own listen there, and tell the orchestrator where every model is.

    hosts: addresses of the nodes from the first one on that has models. They have the key of the policy's engines.
    """
    places, models = dict(cfg.orchestrator.frozen_models), dict(cfg.models)
    key_var = cfg.orchestrator.client.api_key_var
    for index, (name, section) in enumerate(cfg.models.items()):
        known = TeacherSection(base_url=section.base_url, model=section.served_model_name or section.model)
        if section.base_url is None:
            host = hosts[cfg.model_places[name][0]]
            is_given = "port" in section.server.model_fields_set
            port = section.server.port if is_given else MODEL_PORT + index
            server = section.server.model_copy(update={"host": host, "port": port})
            models[name] = section.model_copy(update={"server": server})
            url = f"http://{client_host(host)}:{port}/v1"
            known = known.model_copy(update={"base_url": url, "api_key_var": key_var})
        places[name] = known
    cfg = cfg.model_copy(update={"models": models})
    return replaced(cfg, "orchestrator.frozen_models", places)


def num_gpus(section: FrozenModelSection) -> int:
    """GPUs that a model's engines need; 0 on a CPU."""
    if section.device == "cpu" or section.base_url is not None:
        return 0
    return section.num_gpus


def assign_model_gpus(cfg: RLConfig, taken: set[str], gpus: Sequence[str]) -> dict[str, list[str]]:
    """GPUs of each model's engines: the ones named, else those that nobody has; none on a machine without.

    Raises: ConfigError if there are too few.
    """
    found: dict[str, list[str]] = {}
    for name, section in started_models(cfg):
        wanted = num_gpus(section) * bool(gpus)
        if section.gpu_ids is not None:
            found[name] = [gpus[index] if index < len(gpus) else str(index) for index in section.gpu_ids]
            continue
        free = [gpu for gpu in gpus if gpu not in taken]
        if len(free) < wanted:
            raise ConfigError(
                f"models.{name} takes {wanted} GPUs ({shape_of(section)}), and {len(free)} of this machine's "
                f"{len(gpus)} are free; lower it, name shared ones as models.{name}.gpu_ids, or set "
                f'models.{name}.device = "cpu"'
            )
        found[name] = free[:wanted]
        taken = taken | set(found[name])
    return found


def model_threads(section: FrozenModelSection, threads: dict[str, int], gpus: Sequence[str]) -> int:
    """CPU threads of a model's engine."""
    if section.num_threads is not None:
        return section.num_threads
    return GPU_HOST_THREADS if gpus else max(threads.get("inference", 1), 1)
