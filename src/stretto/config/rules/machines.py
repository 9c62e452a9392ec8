"""Rules of `rl` about machines: engines, ports, GPUs and nodes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from stretto.config.derived import LOCAL_HOSTS
from stretto.config.root import RLConfig
from stretto.config.rules.batches import is_address, urls
from stretto.config.rules.rule import Each, Idle, Rule, Rules, value_of
from stretto.config.rules.slurm import ON_ONE_MACHINE, is_loopback
from stretto.config.sections.inference import InferenceSection

LOOPBACK = "127.0.0.1"
POLICY_NAMES = ("actor", "default")
"""Names of the policy in vime's terms."""
GPU_KEYS = {  # per part of a run: the ids of its GPUs, and their number
    "trainer": ("trainer_gpu_ids", "num_train_gpus"),
    "inference": ("inference_gpu_ids", "num_infer_gpus"),
    "teacher_inference": ("teacher_gpu_ids", "num_teacher_gpus"),
    "critic": ("critic_gpu_ids", "num_critic_gpus"),
}


# -- engines --


def is_served(base_url: list[str] | str, engine: InferenceSection, *, is_only: bool) -> bool:
    """Whether one of the addresses (with is_only, the only one) is that of the engine."""
    given = [base_url] if isinstance(base_url, str) else base_url
    hosts = (*LOCAL_HOSTS, engine.server.host)
    parts = [urlsplit(url) for url in given if is_address(url)]
    found = [each for each in parts if each.hostname in hosts and (each.port or 80) == engine.server.port]
    return bool(found) and (len(given) == 1 or not is_only)


def other_address(cfg: RLConfig) -> str | None:
    """The client's addresses, if none is that of the engine that this run starts."""
    given = urls(cfg.orchestrator.client)
    if cfg.inference is None or not any(map(is_address, given)):
        return None
    if given[1:] and (cfg.deployment.type == "multi_node" or cfg.inference.deployment.num_engines > 1):
        return None  # a resolved config has the addresses of all engines
    return None if is_served(given, cfg.inference, is_only=False) else ", ".join(given)


def teacher_faults(cfg: RLConfig) -> Iterator[tuple[str, str] | tuple[str, str, Any]]:
    """[teacher_inference] and [orchestrator.teacher] agree about the teacher's model and address."""
    teacher, engine = cfg.orchestrator.teacher, cfg.teacher_inference
    if engine is None or teacher is None:
        if teacher is not None and teacher.base_url is None:
            rule = "give base_url of an engine that runs, or model, the directory that one is started with"
            yield "orchestrator.teacher", f"{{0.path}}: {rule}"
        return
    name = engine.served_model_name or engine.model
    if teacher.model not in (None, name):
        rule = '{0} is not what teacher_inference serves, "{it}"; give one of the two'
        yield "orchestrator.teacher.model teacher_inference.model", rule, name
    if teacher.base_url is not None and not is_served(teacher.base_url, engine, is_only=True):
        rule = "{0.path} = {it} is not the engine that teacher_inference starts; give one of the two"
        yield "orchestrator.teacher.base_url teacher_inference.server.port", rule, teacher.base_url
    if engine.deployment.type != "single_node" or engine.deployment.num_replicas != 1:
        rule = "`rl` starts one engine for the teacher; start more by hand and give their base_url"
        yield "teacher_inference.deployment", f"{{0.path}}: {rule}"


def model_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Frozen models have a name, something to serve, and machines with room for it."""
    shape = cfg.deployment
    for name, section in cfg.models.items():
        path = f"models.{name}"
        if name in POLICY_NAMES or not re.fullmatch(r"[A-Za-z][\w-]*", name):
            rule = "is the policy's name" if name in POLICY_NAMES else "must be letters, digits, _ and -"
            yield path, f"{{0.path}}: a model's name {rule}; use another, such as judge"
        if section.api_key is not None:
            yield f"{path}.api_key", "{0.path}: functions send it no key; leave it out"
        if section.base_url is not None:
            continue
        if section.model is None:
            yield path, "{0.path}: give model, the directory to serve, or base_url of engines that run"
        own = section.deployment
        if shape.type != "multi_node":
            if own.num_nodes > 1:
                rule = "takes several nodes, and this run has one"
                way = 'use deployment.type = "multi_node", or give base_url'
                yield f"{path}.deployment", f"{{0.path}} {rule}; {way}"
            continue
        if section.gpu_ids is not None:
            yield f"{path}.gpu_ids", "{0}: over several nodes it gets the first that are free; leave it out"
        gpus = section.gpus_with_idle if own.num_nodes == 1 else getattr(own, "gpus_per_node", 0)
        if shape.gpus_per_node and section.device != "cpu" and gpus > shape.gpus_of_models:
            each = " of each node" * (own.num_nodes > 1)
            rule = f"{gpus} GPUs{each}, and a node of models has {shape.gpus_of_models}"
            ways = "lower its engines or degrees, raise deployment.model_gpus_per_node, spread it over nodes with "
            ways += f"{path}.deployment.type, or start it by hand and give base_url"
            yield path, f"{{0.path}} takes {rule}; {ways}"


# -- ports and GPUs --


def port_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Every server on this machine has a port of its own."""
    owners = ("control", "rollout_transport", "inference.server", "trainer.critic.placement")
    ports = {f"{owner}.port": value_of(cfg, f"{owner}.port") for owner in owners}
    for port, count in Counter(ports.values()).items():
        paths = [path for path, other in ports.items() if other == port]
        if port is not None and count > 1:
            yield " ".join(paths), f"{' and '.join(paths)} are both {port}; give each a port of its own"


def gpu_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """GPU ids are distinct and agree with counts and ranks, and a shared GPU has room for both."""
    for key, count_key in GPU_KEYS.values():
        ids, count = getattr(cfg, key), getattr(cfg.deployment, count_key)
        if ids is not None and (not ids or len(set(ids)) < len(ids) or min(ids) < 0):
            yield key, "{0}: give each GPU once, counted from 0, such as 0,1"
        elif ids is not None and count not in (None, len(ids)):
            yield f"{key} deployment.{count_key}", f"{{0}} are {len(ids)} GPUs but {{1}}; drop one of the two"
    ranks = len(cfg.trainer_gpu_ids or ()) or cfg.deployment.num_train_gpus or 0
    if ranks and ranks != cfg.num_train_ranks:
        key = "trainer_gpu_ids" if cfg.trainer_gpu_ids else "deployment.num_train_gpus"
        message, way_out = f"{{0}} but {{1.path}} gives {ranks} trainer ranks", "leave num_train_workers out"
        if (sharing := cfg.model.cp * cfg.model.tp) > 1:
            message += f", {sharing} (model.cp x tp) to a worker"
            way_out += f", and give a multiple of {sharing} GPUs"
        yield f"orchestrator.num_train_workers {key}", f"{message}; {way_out}"
    shared = set(cfg.trainer_gpu_ids or ()) & set(cfg.inference_gpu_ids or ())
    # With [colocate] each has all memory in its turn.
    engine = cfg.inference if cfg.colocate is None else None
    if shared and engine is not None and engine.gpu_memory_utilization > 0.8:
        gpus = ", ".join(map(str, sorted(shared)))
        rule = f"share GPU {gpus}, and {{2}} leaves the trainer nothing; lower it, such as to 0.5"
        paths = "trainer_gpu_ids inference_gpu_ids inference.gpu_memory_utilization"
        yield paths, f"trainer and inference {rule}"


def engine_gpu_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Inference and teacher are given as many GPUs as their engines take."""
    for name, (ids_key, count_key) in list(GPU_KEYS.items())[1:3]:
        section, ids, count = getattr(cfg, name), getattr(cfg, ids_key), getattr(cfg.deployment, count_key)
        given = count if ids is None else len(ids)
        if section is None or not given or section.device == "cpu" or section.deployment.num_nodes > 1:
            continue
        engines = section.deployment.num_engines
        needed = section.num_gpus
        way_out, verb = f"give {needed}, or lower a degree", "are missing"
        if given > needed:
            ways, verb, more = [f"give {needed}"], "would be idle", given // needed
            if given % needed == 0 and section.deployment.type == "single_node":
                ways.append(f"set {name}.deployment.num_replicas = {engines * more}")
            if given % needed == 0 and section.chosen_engine(has_gpu=True) != "embedded":
                ways.append(f"or set {name}.parallel.dp = {section.parallel.dp * more}")
            way_out = ", ".join(ways)
        if given != needed:
            message = f"{{0.path}} gives {given} GPUs and {name} takes {section.shape_in_words} = {needed}"
            key = ids_key if ids is not None else f"deployment.{count_key}"
            yield f"{key} {name}.parallel", f"{message}, so {abs(given - needed)} {verb}; {way_out}"


# -- nodes --


def node_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """A run over several machines: hosts, ranks and engines on each, wires that reach the others."""
    shape, section = cfg.deployment, cfg.inference
    if shape.type != "multi_node":
        return
    for key in (*(ids for ids, _ in GPU_KEYS.values()), "teacher_inference"):
        if getattr(cfg, key) is not None:
            yield f"{key} deployment.type", ON_ONE_MACHINE
    if cfg.weight_broadcast.type == "shm":
        message = '{0}: shared memory ends at one machine; use "collective" or "filesystem"'
        yield "weight_broadcast.type deployment.type", message
    are_here = shape.hosts is not None and all(map(is_loopback, shape.hosts))
    for wire in ("control", "rollout_transport", "weight_broadcast"):
        host = value_of(cfg, f"{wire}.host") or LOOPBACK  # the default becomes the first node's address
        if host != LOOPBACK and is_loopback(host) and not are_here:
            rule = "other nodes do not reach that; leave it out, for the address of the first node"
            yield f"{wire}.host deployment.type", f"{{0}} with {{1}}: {rule}"
    needed = 0 if section is None else section.deployment.num_nodes
    if section is not None and shape.num_infer_nodes not in (None, needed):
        rule = f"but {{1.path}} takes {needed} node{'s' * (needed != 1)}; make them agree, or leave it out"
        yield "deployment.num_infer_nodes inference.deployment", f"{{0}} {rule}"
    learning = shape.num_learning_nodes
    total = cfg.num_nodes
    if shape.hosts is not None and len(shape.hosts) != total:
        who = "trainer" if learning == shape.num_train_nodes else "trainer and the critic"
        others = " and of models" if cfg.model_places else ""
        rule = f"{learning} of the {who} and {total - learning} of inference{others}"
        yield "deployment.hosts", f"{{0.path}}: {len(shape.hosts)} are given; it takes {total}, {rule}"
    if cfg.num_train_ranks % shape.num_train_nodes:
        message = "{0} are divided among {1} nodes; give a multiple"
        yield "orchestrator.num_train_workers deployment.num_train_nodes", message
    if section is not None and section.deployment.type in ("single_node", "groups") and section.device != "cpu":
        gpus, own = section.num_gpus, shape.infer_gpus_per_node
        has, key = (shape.gpus_per_node, "gpus_per_node") if own is None else (own, "infer_gpus_per_node")
        if 0 < has < gpus and section.deployment.num_nodes == 1:
            rule = f"{section.shape_in_words} = {gpus} GPUs, and a node has {{1}}; lower one of the degrees"
            ways = " or raise deployment.infer_gpus_per_node" * (own is None)
            yield f"inference.parallel deployment.{key}", f"{{0.path}}: {rule}{ways}"


def valid_divisors(number: int, divisor: int) -> str:
    """The divisors of a number, if the given one is none; else ""."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0) if number % divisor else ""


def critic_faults(cfg: RLConfig) -> Iterator[tuple[str, str] | tuple[str, str, Any]]:
    """A critic on ranks of its own: their number divides the policy's, and it has as many GPUs."""
    shape, place = cfg.deployment, "trainer.critic.placement"
    ids = cfg.critic_gpu_ids
    keys = {"critic_gpu_ids": ids, "deployment.num_critic_gpus": shape.num_critic_gpus}
    for key in ("num_critic_nodes", "critic_gpus_per_node"):
        keys[f"deployment.{key}"] = getattr(shape, key, None)
    placement = cfg.critic_placement
    if placement is None:
        for key, value in keys.items():
            if value is not None:
                yield f"{key} {place}", "{0.path} does nothing without [{1.path}]; add that, or leave it out"
        return
    workers, policy = placement.num_workers, cfg.orchestrator.num_train_workers
    if valid := valid_divisors(policy, workers):
        rule = f"each of its ranks has the batches of as many of the policy's; valid: {valid}"
        paths = f"{place}.num_workers orchestrator.num_train_workers"
        yield paths, f"{{0}} does not divide {{1}}: {rule}"
    gpus = len(ids) if ids else shape.num_critic_gpus
    if gpus and gpus != cfg.num_critic_ranks:
        key = "critic_gpu_ids" if ids else "deployment.num_critic_gpus"
        rule = f"give {cfg.num_critic_ranks} (num_workers x model.cp x model.tp), or leave num_workers out"
        yield f"{place}.num_workers {key}", f"{{0}} but {{1.path}} gives {gpus} GPUs; {rule}"
    for other in ("trainer_gpu_ids", "inference_gpu_ids"):
        if shared := sorted({*(ids or ())} & {*(getattr(cfg, other) or ())}):
            rule = f"share GPU {', '.join(map(str, shared))}, and both compute at once"
            yield (f"critic_gpu_ids {other}", f"{{0}} and {{1}} {rule}; give the critic others, or leave {place} out")
    if shape.type == "multi_node":
        each, nodes = shape.critic_gpus_per_node, shape.num_critic_nodes or shape.num_train_nodes
        count = shape.gpus_per_node if each is None else each
        needed = nodes * max(1, count)
        if bool(count) != bool(shape.gpus_per_node):
            rule = "trainer and critic are both on GPUs, or both on CPUs; make them agree"
            yield "deployment.critic_gpus_per_node deployment.gpus_per_node", f"{{0}} with {{1}}: {rule}"
        elif cfg.num_critic_ranks != needed:
            rule = f"its {nodes} nodes of {count} GPUs make {needed} ranks; leave num_workers out"
            yield f"{place}.num_workers | deployment.num_critic_nodes", f"{{0}}: {rule}"


def colocate_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Trainer and engines take turns in synchronous steps, and the engines can sleep."""
    section, inference, orchestrator = cfg.colocate, cfg.inference, cfg.orchestrator
    if section is None:
        return
    if orchestrator.max_async_level:
        rule = "engines sleep while the trainer trains; use 0, or leave it out"
        yield "orchestrator.max_async_level colocate", f"{{0}} with [{{1.path}}]: {rule}"
    if not section.offload_train and not section.offload_rollout:
        yield ("colocate", "[{0.path}]: no process would free memory; make one of its keys true, or leave it out")
    if cfg.deployment.type == "multi_node":
        yield from _colocated_node_faults(cfg)
    if cfg.critic_placement is not None:
        rule = "a critic on ranks of its own takes no turns; leave it out: then it is on the trainer's ranks"
        yield "trainer.critic.placement colocate", f"[{{0.path}}] with [{{1.path}}]: {rule}"
    if inference is None:
        yield "inference colocate", "{0}: with [{1.path}] the run starts its engines; leave one of them out"
    elif section.offload_rollout and (inference.device, inference.chosen_engine(has_gpu=False)) == ("cpu", "vllm"):
        rule = 'vLLM has no sleep mode on a CPU; use engine = "embedded"'
        yield "inference.device colocate", f"{{0}} with [{{1.path}}]: {rule}"
    for key in ("model.lora", "weight_broadcast.delta"):
        if value_of(cfg, key) and section.offload_rollout and section.sleep_level == 2:
            rule = "what engines load is not all of their weights, which level 2 drops; use 1"
            yield f"colocate.sleep_level {key}", f"{{0}} with {{1.path}}: {rule}"


def _colocated_node_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """With [colocate], each of the trainer's nodes has engines that take the same GPUs."""
    shape, section = cfg.deployment, cfg.inference
    if shape.type != "multi_node" or section is None:
        return
    own, nodes = section.deployment, shape.num_infer_replicas * section.deployment.num_nodes
    if nodes != shape.num_train_nodes:
        rule = f"engines take {shape.num_infer_replicas} x {own.num_nodes} = {nodes} nodes, those of the trainer"
        paths = "deployment.num_train_nodes deployment.num_infer_replicas"
        yield paths, f"{{0}}: {rule}; give {nodes}, or change {{1.path}}"
    if cfg.weight_broadcast.type == "collective" and shape.gpus_per_node:
        rule = 'NCCL connects no two processes of one GPU; use "filesystem"'
        yield "weight_broadcast.type colocate", f"{{0}} with [{{1.path}}] on several nodes: {rule}"
    each = section.num_gpus
    if own.type == "multi_node":
        is_one = section.enable_expert_parallel and own.nodes_per_engine == 1  # over all nodes
        each = section.parallel.num_gpus * (1 if is_one else own.num_engines) // own.num_nodes
    elif own.type != "single_node" and own.num_nodes > 1:
        each = own.gpus_per_node
    if shape.gpus_per_node and section.device != "cpu" and each != shape.gpus_per_node:
        rule = f"the trainer takes {{0}} GPUs of a node and its engines {each}, and they take turns on the same"
        paths = "deployment.gpus_per_node inference.parallel"
        yield paths, f"[colocate]: {rule}; change {{1.path}}, or their number"


def ipc_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """With "ipc" one engine, one process on the trainer's GPU, maps the memory of the trainer."""
    inference = cfg.inference
    if cfg.weight_broadcast.type != "ipc":
        return
    is_cpu = inference is not None and inference.device == "cpu"
    has_several = inference is not None and inference.num_gpus > 1 and not is_cpu
    num_workers = cfg.orchestrator.num_train_workers
    for other, is_broken, why in (
        ("weight_broadcast.delta", cfg.weight_broadcast.delta, "copies go through the memory of the host"),
        ("deployment.type", cfg.deployment.type == "multi_node", "its engines are on other machines"),
        ("orchestrator.num_train_workers", num_workers > 1, "trainer and engine share one GPU, and there are several"),
        ("inference", inference is None, "this run starts no engine on its GPU"),
        ("inference.device", is_cpu, "the engine has no GPU"),
        ("inference.deployment", has_several, "one process can map the memory, and there are several"),
    ):
        if is_broken:
            yield f"weight_broadcast.type {other}", f'{{0}} with {{1.path}}: {why}; use "shm" or "collective"'


def idle_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """idle_gpus is for several machines; on one machine the GPUs that are used are given by id."""
    for name in ("inference", *(f"models.{name}" for name in cfg.models)):
        section = value_of(cfg, name)
        if section is None or section.deployment.type != "groups" or cfg.deployment.type != "single_node":
            continue
        for index, group in enumerate(section.deployment.groups):
            if group.idle_gpus:
                ids = "inference_gpu_ids" if name == "inference" else f"{name}.gpu_ids"
                way = "on one machine name the GPUs of the engines, and leave this out"
                yield f"{name}.deployment.groups.{index}.idle_gpus {ids}", f"{{0}}: {way}: {{1.path}}"


def group_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """A group is one request where an environment generates it at once, and an engine accepts it."""
    orchestrator = cfg.orchestrator
    sizes = {"group_size": orchestrator.group_size}
    sizes |= {f"env.{i}.group_size": env.group_size or 0 for i, env in enumerate(orchestrator.env)}
    for limit, key in _values_per_shape(cfg.inference, "max_num_seqs"):
        for path, size in sizes.items():
            if size > limit:
                rule = "an engine samples a group in one request, and takes {1}; raise that or lower the group"
                yield f"orchestrator.{path} {key}", f"{{0}}: {rule}"


def length_faults(cfg: RLConfig) -> Iterator[tuple[str, str]]:
    """Every engine accepts the longest sample: a router may send it to any of them."""
    for length, key in _values_per_shape(cfg.inference, "max_model_len"):
        if (length or cfg.seq_len) < cfg.seq_len:
            yield f"{key} seq_len", "{0} is shorter than {1}; raise it or lower seq_len"


def _values_per_shape(section: InferenceSection | None, key: str) -> Iterator[tuple[Any, str]]:
    """The value of a key of [inference] for each shape of engine, and its path."""
    if section is None:
        return
    if section.deployment.type != "groups":
        yield getattr(section, key), f"inference.{key}"
        return
    groups = enumerate(section.deployment.groups)
    found = {group.path(f"deployment.groups.{i}", key): getattr(section.of_group(group), key) for i, group in groups}
    yield from ((value, f"inference.{path}") for path, value in found.items())


def more_than_a_node(cfg: RLConfig) -> int | None:
    """GPUs of all processes, if they are more than the run may use of this machine."""
    shape = cfg.deployment
    if shape.type != "single_node" or shape.gpus_per_node is None:
        return None
    gpus = sum(each or 0 for each in (shape.num_train_gpus, shape.num_infer_gpus, shape.num_teacher_gpus))
    return gpus if gpus > shape.gpus_per_node else None


def valid_copies(cfg: RLConfig) -> str:
    """Divisors of the data-parallel ranks, where dp_replicate is none."""
    return valid_divisors(cfg.orchestrator.num_train_workers, cfg.model.dp_replicate)


# fmt: off
def with_server(name: str) -> Rule:
    """A rule: engines of a run have a server."""
    key = f"{name}.vllm_extra.headless"
    return Rule(key, lambda c: value_of(c, key) is True,
                "{0} is a process without a server, which `inference` starts on an engine's further nodes, and the "
                "run would wait for it; leave it out")


RULES: Rules = {
    RLConfig: (
        Rule("model.scratch", lambda c: c.inference is not None and c.model.scratch is not None,
             "{0.path} makes a network that no engine has, and the engine starts from a directory; make one with "
             "`sft` (its weights are in RUN/weights/latest) and give it as model.name"),
        Rule("trainer.enable_router_replay inference.enable_return_routed_experts",
             lambda c: c.inference and c.trainer.enable_router_replay and not c.inference.enable_return_routed_experts,
             "{0} but {1}: there would be nothing to replay; drop the latter"),
        Rule("orchestrator.train.replay inference.enable_return_sampling_mask",
             lambda c: c.inference and c.orchestrator.train.replay and not c.inference.enable_return_sampling_mask,
             "{0.path} with {1}: there would be nothing to replay; drop the latter"),
        Rule("orchestrator.client.base_url inference.server.port", other_address,
             '{0.path} = "{it}" but the engine of this run listens on {1}; make them agree, leave base_url out, '
             "or use --no-inference for engines that already run"),
        Rule("teacher_inference.max_model_len seq_len",
             lambda c: c.teacher_inference and (c.teacher_inference.max_model_len or math.inf) <= c.seq_len,
             "{0} must be above {1}: a scored sample takes one token more"),
        Rule("inference.device inference_gpu_ids",
             lambda c: c.inference is not None and c.inference.device == "cpu" and c.inference_gpu_ids,
             "{0} but {1.path} names GPUs; drop one of the two"),
        Rule("deployment.gpus_per_node deployment.num_train_gpus deployment.num_infer_gpus", more_than_a_node,
             "{0} is less than the {it} GPUs of trainer and inference; lower their numbers, or raise it"),
        Rule("model.dp_replicate orchestrator.num_train_workers", valid_copies,
             "{0} does not divide {1} data-parallel ranks; valid: {it}"),
        *map(with_server, ("inference", "teacher_inference")),
        Idle("teacher_gpu_ids", "teacher_inference",
             lambda c: c.teacher_inference is None and "this run starts no teacher"),
        *map(Each, (teacher_faults, model_faults, group_faults, length_faults, idle_faults, port_faults, gpu_faults,
                    engine_gpu_faults, node_faults, critic_faults, colocate_faults, ipc_faults)),
    ),
}
# fmt: on
