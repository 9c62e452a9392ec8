"""A Kubernetes pod's view of its run: which pod it is, where the others are, and which processes of the plan it starts.

The chart (deploy/helm/stretto) gives every pod the same config and these variables:

    POD_NAME            <StatefulSet>-<ordinal>; the ordinal is the number of the node
    POD_IP              the address to listen at
    HEADLESS_SERVICE    domain of the StatefulSet's pods: pod i is <StatefulSet>-<i>.<HEADLESS_SERVICE>
    STATEFUL_REPLICAS   the number of these pods
    STRETTO_PODS        JSON: name, service, replicas, GPUs, ports of the release's StatefulSets; the router's host

A pod needs no rights in the Kubernetes API, because it does not use it. run.py starts the processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.secret import Secret
from stretto.config.load import load
from stretto.config.root import RLConfig
from stretto.config.sections.deployment import ResumeSection
from stretto.config.sections.inference import KEY_VAR, InferenceSection
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.placement import replaced
from stretto.launch.plan.plan import LaunchPlan
from stretto.launch.plan.processes import ProcessSpec, helper_processes
from stretto.launch.plan.routers import plan_registrars, plan_router

PODS_VAR = "STRETTO_PODS"
ROLES = ("orchestrator", "trainer", "inference", "router")
IN_CHART = "the chart deploy/helm/stretto sets it"


@dataclass(frozen=True)
class StatefulSet:
    """Pods of one role."""

    name: str
    service: str
    """Domain of the headless service."""
    replicas: int
    gpus: int = 0
    """GPUs of one pod."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports of its service, by their names in the chart's values: port; for the trainer, ncclPort, rendezvousPort."""

    @property
    def hosts(self) -> list[str]:
        """The name of each pod in DNS, by ordinal."""
        return [f"{self.name}-{ordinal}.{self.service}" for ordinal in range(self.replicas)]


@dataclass(frozen=True)
class Pod:
    """This pod, and those of all roles."""

    role: str
    ordinal: int
    ip: str
    sets: Mapping[str, StatefulSet]
    """By role; without the roles that the release does not have."""
    router: str | None
    """Host of the router's service; None: the release has no router pod."""

    @property
    def host(self) -> str:
        """This pod's name in DNS."""
        return self.sets[self.role].hosts[self.ordinal]


def find_pod(role: str, env: Mapping[str, str] = os.environ) -> Pod:
    """This pod, from its environment.

    Raises: ConfigError naming the variable that is missing or wrong.
    """
    if role not in ROLES:
        raise ConfigError(f"stretto pod: {role!r} is no part of a run; give one of {', '.join(ROLES)}")
    sets, router = _read_pods(_variable(env, PODS_VAR))
    if missing := [each for each in ("orchestrator", "trainer", role) if each not in sets]:
        raise ConfigError(f"{PODS_VAR} has no {missing[0]}: {IN_CHART}; is this pod of another release?")
    ordinal = find_ordinal(_variable(env, "POD_NAME"))
    mine = sets[role]
    if ordinal >= mine.replicas:
        raise ConfigError(
            f"pod {env['POD_NAME']} is beyond the {mine.replicas} that {role}.replicas says, and the run has no work "
            f"for it; scale with `helm upgrade --set {role}.replicas={ordinal + 1}`, not with `kubectl scale`"
        )
    return Pod(role, ordinal, _variable(env, "POD_IP"), sets, router)


def find_ordinal(pod_name: str) -> int:
    """The number at the end of a StatefulSet's pod name.

    Raises: ConfigError for another name.
    """
    if (match := re.search(r"-(\d+)$", pod_name)) is None:
        raise ConfigError(f"POD_NAME = {pod_name!r} does not end in an ordinal, as the pods of a StatefulSet do")
    return int(match[1])


def _variable(env: Mapping[str, str], name: str) -> str:
    if not (text := env.get(name, "")):
        raise ConfigError(f"`stretto pod` needs the environment variable {name}; {IN_CHART}")
    return text


def _read_pods(text: str) -> tuple[dict[str, StatefulSet], str | None]:
    try:
        data = json.loads(text)
        sets = {role: StatefulSet(**data[role]) for role in ROLES if data.get(role)}
        return sets, data.get("routerHost")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{PODS_VAR} is not what the chart writes: {error}") from error


# -- config and plan --


def load_config(pod: Pod, words: Sequence[str]) -> RLConfig:
    """The run's config with the shape of the cluster as further flags, so that the rules check all of it.

    words: `@ FILE.toml` and flags, as those of `rl`.

    Raises: ConfigError listing what is wrong.
    """
    cfg = load(RLConfig, list(words), verb="stretto pod")
    flags = {**_trainer_flags(pod), **_wire_flags(pod, cfg), **_engine_flags(pod, cfg.inference)}
    cfg = load(RLConfig, [*words, *_as_words(flags)], verb="stretto pod")
    port = pod.sets["trainer"].ports.get("ncclPort")
    if port is not None and hasattr(cfg.weight_broadcast, "port"):
        cfg = replaced(cfg, "weight_broadcast.port", port)
    if cfg.num_critic_ranks:
        raise ConfigError(
            "trainer.critic.placement: the chart has no pods for a critic of its own; leave it out: then the critic is "
            "on the trainer's ranks"
        )
    if cfg.colocate is not None:
        raise ConfigError(
            "[colocate]: the chart has pods for the trainer and for inference, each with its own GPUs; leave it out"
        )
    _check_router(pod, cfg)
    return cfg


def _as_words(flags: Mapping[str, Any]) -> list[str]:
    as_text = lambda value: value if isinstance(value, str) else json.dumps(value)
    return [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", as_text(value))]


def _trainer_flags(pod: Pod) -> dict[str, Any]:
    trainer = pod.sets["trainer"]
    flags = {
        "deployment.type": "multi_node",
        "deployment.num_train_nodes": trainer.replicas,
        "deployment.gpus_per_node": trainer.gpus,
    }
    if (port := trainer.ports.get("rendezvousPort")) is not None:
        flags["deployment.rendezvous_port"] = port
    return flags


def _wire_flags(pod: Pod, cfg: RLConfig) -> dict[str, Any]:
    """Addresses of the orchestrator's wires: it listens at its pod's IP, the others use its name in DNS."""
    host = pod.ip if pod.role == "orchestrator" else pod.sets["orchestrator"].hosts[0]
    wires = [wire for wire in ("control", "rollout_transport") if hasattr(getattr(cfg, wire), "host")]
    return {f"{wire}.host": host for wire in wires}


def _engine_flags(pod: Pod, section: InferenceSection | None) -> dict[str, Any]:
    """The shape of inference: the config's if it takes several nodes, else one or several engines per pod.

    Raises: ConfigError if the number of pods does not fit the shape.
    """
    trainers, engines = pod.sets["trainer"].hosts, pod.sets.get("inference")
    if section is None:
        return {"deployment.hosts": trainers}
    if engines is None:
        raise ConfigError(
            "the config starts engines ([inference]), and the release has no inference pods: set inference.replicas, "
            "or say `inference = false` in the config and give orchestrator.client.base_url"
        )
    each, shape = section.deployment.num_nodes, section.deployment.type
    if engines.replicas % each:
        raise ConfigError(
            f'inference.deployment.type = "{shape}" takes {each} pods, and inference.replicas = {engines.replicas} is '
            "no multiple of that"
        )
    flags: dict[str, Any] = {
        "deployment.hosts": [*trainers, *engines.hosts],
        "deployment.num_infer_replicas": engines.replicas // each,
    }
    if pod.role in ("inference", "router") and section.server.host == "127.0.0.1":
        flags["inference.server.host"] = pod.ip
    if not engines.gpus:
        flags["inference.device"] = "cpu"
    elif shape == "single_node":
        flags["deployment.infer_gpus_per_node"] = engines.gpus
    if (port := engines.ports.get("port")) is not None:
        flags["inference.server.port"] = port
    if pod.router is not None and (at := pod.sets["router"].ports.get("port")) not in (None, port):
        flags["inference.deployment.router_port"] = at
    return flags


def _check_router(pod: Pod, cfg: RLConfig) -> None:
    """Raises: ConfigError if the release has a router pod that the plan has no process for."""
    section = cfg.inference
    if section is not None and section.router is not None and section.router.type == "dynamo":
        raise ConfigError(
            'inference.router.type = "dynamo": the chart starts vllm-router, or llm-d with llmd.enabled; leave it out, '
            "or set router.enabled=false and inference.router.address"
        )
    if pod.router is None:
        return
    if section is None or section.router is None or section.router.address is not None:
        raise ConfigError(
            "the release has a router's pod, and the config has no router of its own (inference, inference.router or "
            "inference.router.address); set router.enabled=false"
        )
    if not _is_plain(section) and (
        section.deployment.type == "single_node"
        or (cfg.deployment.type == "multi_node" and cfg.deployment.num_infer_replicas > 1)
    ):
        raise ConfigError(
            "every inference pod, or group of pods, has several engines with a router of their own; set "
            "router.enabled=false: the orchestrator spreads rollouts over these routers"
        )


def _is_plain(section: InferenceSection) -> bool:
    """Whether each inference pod is one engine of its own."""
    return section.deployment.type == "single_node" and section.deployment.num_replicas == 1


def plan_pods(
    cfg: RLConfig, pod: Pod, run: RunDir, resume_step: int | None = None, secret: Secret | None = None
) -> LaunchPlan:
    """The plan of the whole run: as for several nodes, with pods of their own for orchestrator and router."""
    section = cfg.inference
    if section is not None and _is_plain(section):  # all engines have one router, or none
        plan = plan_nodes(replaced(cfg, "inference.router", None), run, resume_step, secret, in_pods=True)
        plan = _with_router(plan, pod, section)
    else:
        plan = plan_nodes(cfg, run, resume_step, secret, in_pods=True)
    hosts, moved = [*plan.hosts, pod.sets["orchestrator"].hosts[0]], {"orchestrator": len(plan.hosts)}
    if pod.router is not None and plan.engines is not None:
        moved["router"] = len(hosts)
        hosts.append(pod.sets["router"].hosts[0])
        plan = _with_url(plan, f"http://{pod.router}:{plan.engines.routers[0].port}")
    processes = [dataclasses.replace(spec, node=moved.get(spec.role, spec.node)) for spec in plan.processes]
    notes = (*plan.notes, *_gpu_notes(pod, plan))
    return dataclasses.replace(plan, hosts=tuple(hosts), processes=tuple(processes), notes=notes)


def _gpu_notes(pod: Pod, plan: LaunchPlan) -> list[str]:
    """A note about GPUs of inference pods that are not used.

    Raises: ConfigError if the pods have too few.
    """
    count = pod.sets["inference"].gpus if "inference" in pod.sets else 0
    specs = [spec for spec in plan.processes if spec.role == "inference"]
    by_node = Counter(node for node, _ in {(spec.node, gpu) for spec in specs for gpu in spec.devices})
    used = max(by_node.values(), default=0)
    if not count or not used or used == count:
        return []
    fact = f"inference.gpu.count = {count}, and [inference] takes {used} in each pod"
    keys = "[inference] parallel, deployment.num_replicas or deployment.gpus_per_node"
    if used > count:
        raise ConfigError(f"{fact}; raise the count, or lower {keys}")
    return [f"{fact}: the others are idle; lower the count, or raise {keys}"]


def _with_router(plan: LaunchPlan, pod: Pod, section: InferenceSection) -> LaunchPlan:
    """The plan with the release's router in front of all engines, or with the router that runs elsewhere."""
    engines = plan.engines
    if section.router is None or engines is None:
        return plan
    hosts = pod.sets["inference"].hosts
    if section.router.address is not None:
        registrars = plan_registrars(section.router, engines.engines, hosts)
        plan = _with_url(plan, section.router.address)
        engines = dataclasses.replace(engines, registrars=registrars)
    elif pod.router is None:
        return plan
    else:
        router, _ = plan_router(section.router, engines.engines, hosts, section)
        engines = dataclasses.replace(engines, routers=(router,))
    (key,) = {spec.env.get(KEY_VAR, "") for spec in plan.processes if spec.role == "inference"}
    first = pod.sets["trainer"].replicas
    started = helper_processes(dataclasses.replace(engines, stores=()), first, router_env={KEY_VAR: key})
    return dataclasses.replace(plan, engines=engines, processes=(*plan.processes, *started))


def _with_url(plan: LaunchPlan, url: str) -> LaunchPlan:
    """The plan in which all rollouts go to one address."""
    assert plan.engines is not None
    root = replaced(plan.config, "orchestrator.client.base_url", f"{url}/v1")
    return dataclasses.replace(plan, config=root, engines=dataclasses.replace(plan.engines, base_urls=(url,)))


def own_processes(plan: LaunchPlan, pod: Pod) -> list[ProcessSpec]:
    """The processes that this pod starts."""
    return [spec for spec in plan.processes if plan.hosts[spec.node] == pod.host]


def with_newest_checkpoint(cfg: RLConfig, run: RunDir) -> RLConfig:
    """The config that continues this run from its newest checkpoint, if it has one.

    Raises: ConfigError if max_steps is below that checkpoint's step.
    """
    if (step := run.latest_complete_checkpoint()) is None:
        return cfg
    rundir.check_max_steps(cfg.max_steps, step)
    return cfg.model_copy(update={"resume": ResumeSection(step=step)})
