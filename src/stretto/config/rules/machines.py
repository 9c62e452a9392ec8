"""Rules about machines: engines, ports, GPUs and nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from stretto.base.ports import LOOPBACK, is_loopback
from stretto.config.root import InferenceConfig, RLConfig, SFTConfig
from stretto.config.rules.batches import urls
from stretto.config.rules.rule import (
    At,
    Problem,
    Problems,
    Rules,
    idle,
    is_address,
    is_served,
    valid_divisors,
    value_of,
)
from stretto.config.sections.inference import InferenceSection

HOST = re.compile(r"[\w.-]+|(?=.*:.*:)[\da-fA-F:.]+(%[\w.-]+)?")
"""A name or an address of a machine, those of IPv6 without brackets."""
GPU_KEYS = {  # per part of a run: the ids of its GPUs, and their number
    "trainer": ("trainer_gpu_ids", "num_train_gpus"),
    "inference": ("inference_gpu_ids", "num_infer_gpus"),
    "teacher_inference": ("teacher_gpu_ids", "num_teacher_gpus"),
    "critic": ("critic_gpu_ids", "num_critic_gpus"),
}


# -- engines --


def network(c: RLConfig, at: At) -> Problems:
    """Engines have the network that is trained, and keep what the trainer replays."""
    scratch, replays, keeps = map(
        at, ("model.scratch", "trainer.enable_router_replay", "inference.enable_return_routed_experts")
    )
    if c.inference is None:
        return
    if c.model.scratch is not None:
        yield Problem(
            scratch,
            f"{scratch.path} makes a network that no engine has, and the engine starts from a directory; make one with "
            "`sft` (its weights are in RUN/weights/latest) and give it as model.name",
        )
    if c.trainer.enable_router_replay and not c.inference.enable_return_routed_experts:
        what = f"{replays} but {keeps}: there would be nothing to replay; drop the latter"
        yield Problem((replays, keeps), what)
    masks, kept = at("orchestrator.train.replay"), at("inference.enable_return_sampling_mask")
    if c.orchestrator.train.replay and not c.inference.enable_return_sampling_mask:
        what = f"{masks.path} with {kept}: there would be nothing to replay; drop the latter"
        yield Problem((masks, kept), what)


def client_address(c: RLConfig, at: At) -> Problems:
    """One of the client's addresses is that of the engine that this run starts."""
    given = urls(c.orchestrator.client)
    if c.inference is None or not any(map(is_address, given)):
        return
    if given[1:] and (c.deployment.type == "multi_node" or c.inference.deployment.num_engines > 1):
        return  # a resolved config has the addresses of all engines
    if not is_served(given, c.inference, is_only=False):
        url, port = at("orchestrator.client.base_url"), at("inference.server.port")
        yield Problem(
            (url, port),
            f'{url.path} = "{", ".join(given)}" but the engine of this run listens on {port}; make them agree, leave '
            "base_url out, or use --no-inference for engines that already run",
        )


def device_of_engines(c: RLConfig, at: At) -> Problems:
    """Engines on the CPU have no GPUs, and a run may use the GPUs that it takes."""
    device, ids = at("inference.device"), at("inference_gpu_ids")
    if c.inference is not None and c.inference.device == "cpu" and c.inference_gpu_ids:
        yield Problem((device, ids), f"{device} but {ids.path} names GPUs; drop one of the two")
    shape = c.deployment
    if shape.type != "single_node" or shape.gpus_per_node is None:
        return
    needed = sum(each or 0 for each in (shape.num_train_gpus, shape.num_infer_gpus, shape.num_teacher_gpus))
    has, trains, serves = (at(f"deployment.{key}") for key in ("gpus_per_node", "num_train_gpus", "num_infer_gpus"))
    if needed > shape.gpus_per_node:
        what = f"is less than the {needed} GPUs of trainer and inference; lower their numbers, or raise it"
        yield Problem((has, trains, serves), f"{has} {what}")


def replicas(c: RLConfig, at: At) -> Problems:
    """Copies of the weights divide the data-parallel ranks."""
    copies, workers = at("model.dp_replicate"), at("orchestrator.num_train_workers")
    if valid := valid_divisors(c.orchestrator.num_train_workers, c.model.dp_replicate):
        rule = f"{copies} does not divide {workers} data-parallel ranks; valid: {valid}"
        yield Problem((copies, workers), rule)


def group_requests(c: RLConfig, at: At) -> Problems:
    """A group is one request where an environment generates it at once, and an engine accepts it."""
    sizes = {"group_size": c.orchestrator.group_size}
    sizes |= {f"env.{i}.group_size": env.group_size or 0 for i, env in enumerate(c.orchestrator.env)}
    for most, path in _values_per_shape(c.inference, "max_num_seqs"):
        for name, size in sizes.items():
            if size > most:
                group, limit = at(f"orchestrator.{name}"), at(path)
                rule = f"an engine samples a group in one request, and takes {limit}; raise that or lower the group"
                yield Problem((group, limit), f"{group}: {rule}")


def sample_lengths(c: RLConfig, at: At) -> Problems:
    """Every engine accepts the longest sample: a router may send it to any of them."""
    for most, path in _values_per_shape(c.inference, "max_model_len"):
        if (most or c.seq_len) < c.seq_len:
            limit, length = at(path), at("seq_len")
            yield Problem((limit, length), f"{limit} is shorter than {length}; raise it or lower seq_len")


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


def idle_gpus(c: RLConfig, at: At) -> Problems:
    """idle_gpus is for several machines; on one machine the GPUs that are used are given by id."""
    for name in ("inference", *(f"models.{name}" for name in c.models)):
        section = value_of(c, name)
        if section is None or section.deployment.type != "groups" or c.deployment.type != "single_node":
            continue
        ids = at("inference_gpu_ids" if name == "inference" else f"{name}.gpu_ids")
        for index, group in enumerate(section.deployment.groups):
            if group.idle_gpus:
                key = at(f"{name}.deployment.groups.{index}.idle_gpus")
                way = f"on one machine name the GPUs of the engines, and leave this out: {ids.path}"
                yield Problem((key, ids), f"{key}: {way}")


# -- ports and GPUs --


def ports(c: RLConfig, at: At) -> Problems:
    """Every server on this machine has a port of its own."""
    owners = ("control", "rollout_transport", "inference.server", "trainer.critic.placement")
    found = [at(f"{owner}.port") for owner in owners]
    for port, count in Counter(key.held for key in found).items():
        same = tuple(key for key in found if key.held == port)
        if port is not None and count > 1:
            names = " and ".join(key.path for key in same)
            yield Problem(same, f"{names} are both {port}; give each a port of its own")


def gpus(c: RLConfig, at: At) -> Problems:
    """GPU ids are distinct and agree with counts and ranks, and a shared GPU has room for both."""
    for ids_key, count_key in GPU_KEYS.values():
        ids, number = at(ids_key), at(f"deployment.{count_key}")
        given = ids.held
        if given is not None and (not given or len(set(given)) < len(given) or min(given) < 0):
            yield Problem(ids, f"{ids}: give each GPU once, counted from 0, such as 0,1")
        elif given is not None and number.held not in (None, len(given)):
            yield Problem((ids, number), f"{ids} are {len(given)} GPUs but {number}; drop one of the two")
    ranks = len(c.trainer_gpu_ids or ()) or c.deployment.num_train_gpus or 0
    if ranks and ranks != c.num_train_ranks:
        key = at("trainer_gpu_ids" if c.trainer_gpu_ids else "deployment.num_train_gpus")
        workers, sharing = at("orchestrator.num_train_workers"), c.ranks_per_worker
        what, way = f"{workers} but {key.path} gives {ranks} trainer ranks", "leave num_train_workers out"
        if sharing > 1:
            stages = " x trainer.megatron.pp" if c.trainer.megatron is not None else ""
            what += f", {sharing} (model.cp x tp{stages}) to a worker"
            way += f", and give a multiple of {sharing} GPUs"
        yield Problem((workers, key), f"{what}; {way}")
    shared = set(c.trainer_gpu_ids or ()) & set(c.inference_gpu_ids or ())
    # With [colocate] each has all memory in its turn.
    engine = c.inference if c.colocate is None else None
    if shared and engine is not None and engine.gpu_memory_utilization > 0.8:
        keys = at("trainer_gpu_ids"), at("inference_gpu_ids"), at("inference.gpu_memory_utilization")
        what = f"share GPU {', '.join(map(str, sorted(shared)))}, and {keys[2]} leaves the trainer nothing"
        yield Problem(keys, f"trainer and inference {what}; lower it, such as to 0.5")


def gpus_of_engines(c: RLConfig, at: At) -> Problems:
    """Inference and teacher are given as many GPUs as their engines take."""
    for name in ("inference", "teacher_inference"):
        ids, number = at(GPU_KEYS[name][0]), at(f"deployment.{GPU_KEYS[name][1]}")
        section, given = getattr(c, name), number.held if ids.held is None else len(ids.held)
        if section is None or not given or section.device == "cpu" or section.deployment.num_nodes > 1:
            continue
        needed = section.num_gpus
        if given == needed:
            continue
        rest = f"{needed - given} are missing; give {needed}, or lower a degree"
        if given > needed:
            ways, more = [f"give {needed}"], given // needed
            if given % needed == 0 and section.deployment.type == "single_node":
                ways.append(f"set {name}.deployment.num_replicas = {section.deployment.num_engines * more}")
            if given % needed == 0 and section.chosen_engine(has_gpu=True) != "embedded":
                ways.append(f"or set {name}.parallel.dp = {section.parallel.dp * more}")
            rest = f"{given - needed} would be idle; {', '.join(ways)}"
        key = number if ids.held is None else ids
        what = f"{key.path} gives {given} GPUs and {name} takes {section.shape_in_words} = {needed}"
        yield Problem((key, at(f"{name}.parallel")), f"{what}, so {rest}")


# -- nodes --


def nodes(c: RLConfig, at: At) -> Problems:
    """A run over several machines: hosts, ranks, and wires that reach the others."""
    shape, kind = c.deployment, at("deployment.type")
    if shape.type != "multi_node":
        return
    for key in map(at, (*(ids for ids, _ in GPU_KEYS.values()), "teacher_inference")):
        if key.held is not None:
            yield Problem((key, kind), f"{key.path} names what is on one machine; with {kind} leave it out")
    wire = at("weight_broadcast.type")
    if c.weight_broadcast.type == "shm":
        what = 'shared memory ends at one machine; use "collective" or "filesystem"'
        yield Problem((wire, kind), f"{wire}: {what}")
    are_here = shape.hosts is not None and all(map(is_loopback, shape.hosts))
    for key in map(at, ("control.host", "rollout_transport.host", "weight_broadcast.host")):
        host = key.held or LOOPBACK  # the default becomes the first node's address
        if host != LOOPBACK and is_loopback(host) and not are_here:
            what = "other nodes do not reach that; leave it out, for the address of the first node"
            yield Problem((key, kind), f"{key} with {kind}: {what}")
    learning, total, hosts = shape.num_learning_nodes, c.num_nodes, at("deployment.hosts")
    if shape.hosts is not None and len(shape.hosts) != total:
        who = "trainer" if learning == shape.num_train_nodes else "trainer and the critic"
        others = " and of models" if c.model_places else ""
        rule = f"{learning} of the {who} and {total - learning} of inference{others}"
        yield Problem(hosts, f"{hosts.path}: {len(shape.hosts)} are given; it takes {total}, {rule}")
    workers, trains = at("orchestrator.num_train_workers"), at("deployment.num_train_nodes")
    if c.num_train_ranks % shape.num_train_nodes:
        yield Problem((workers, trains), f"{workers} are divided among {trains} nodes; give a multiple")


def nodes_of_engines(c: RLConfig, at: At) -> Problems:
    """Inference has the nodes that its engines take, and each node has the GPUs of one."""
    shape, s = c.deployment, c.inference
    if shape.type != "multi_node" or s is None:
        return
    needed, number, engines = s.deployment.num_nodes, at("deployment.num_infer_nodes"), at("inference.deployment")
    if shape.num_infer_nodes not in (None, needed):
        takes = "1 node" if needed == 1 else f"{needed} nodes"
        what = f"{number} but {engines.path} takes {takes}; make them agree, or leave it out"
        yield Problem((number, engines), what)
    if s.deployment.type not in ("single_node", "groups") or s.device == "cpu":
        return
    own = shape.infer_gpus_per_node
    has, way = shape.gpus_per_node if own is None else own, "lower one of the degrees"
    if 0 < has < s.num_gpus and needed == 1:
        if own is None:
            way += " or raise deployment.infer_gpus_per_node"
        key, degrees = at(f"deployment.{'' if own is None else 'infer_'}gpus_per_node"), at("inference.parallel")
        rule = f"{s.shape_in_words} = {s.num_gpus} GPUs, and a node has {key}; {way}"
        yield Problem((degrees, key), f"{degrees.path}: {rule}")


def critic(c: RLConfig, at: At) -> Problems:
    """GPUs of a critic are for one on ranks of its own."""
    place = at("trainer.critic.placement")
    if c.critic_placement is None:
        on_nodes = ("deployment.num_critic_nodes", "deployment.critic_gpus_per_node")
        for key in map(at, ("critic_gpu_ids", "deployment.num_critic_gpus", *on_nodes)):
            if key.held is not None:
                rule = f"does nothing without [{place.path}]; add that, or leave it out"
                yield Problem((key, place), f"{key.path} {rule}")


def teacher(c: RLConfig, at: At) -> Problems:
    """GPUs of a teacher are for one that the run starts."""
    if c.teacher_inference is None:
        keys = ("teacher_gpu_ids", "deployment.num_teacher_gpus")
        yield from idle(at, keys, "teacher_inference", why="this run starts no teacher")


# -- processes that share GPUs --


def colocation(c: RLConfig, at: At) -> Problems:
    """Trainer and engines take turns in synchronous steps, and the engines can sleep."""
    section, s, table = c.colocate, c.inference, at("colocate")
    if section is None:
        return
    levels = at("orchestrator.max_async_level")
    if c.orchestrator.max_async_level:
        rule = "engines sleep while the trainer trains; use 0, or leave it out"
        yield Problem((levels, table), f"{levels} with [{table.path}]: {rule}")
    if not section.offload_train and not section.offload_rollout:
        way = "make one of its keys true, or leave it out"
        yield Problem(table, f"[{table.path}]: no process would free memory; {way}")
    yield from _colocated_nodes(c, at)
    if s is None:
        engines = at("inference")
        rule = f"with [{table.path}] the run starts its engines; leave one of them out"
        yield Problem((engines, table), f"{engines}: {rule}")
    for key in (at("model.lora"), at("weight_broadcast.delta")):
        level = at("colocate.sleep_level")
        if key.held and section.offload_rollout and section.sleep_level == 2:
            rule = "what engines load is not all of their weights, which level 2 drops; use 1"
            yield Problem((level, key), f"{level} with {key.path}: {rule}")


def _colocated_nodes(c: RLConfig, at: At) -> Problems:
    """With [colocate], each of the trainer's nodes has engines that take the same GPUs."""
    shape, section, table = c.deployment, c.inference, at("colocate")
    if shape.type != "multi_node" or section is None:
        return
    own, nodes = section.deployment, shape.num_infer_replicas * section.deployment.num_nodes
    trains, copies = at("deployment.num_train_nodes"), at("deployment.num_infer_replicas")
    if nodes != shape.num_train_nodes:
        rule = f"engines take {shape.num_infer_replicas} x {own.num_nodes} = {nodes} nodes, those of the trainer"
        yield Problem((trains, copies), f"{trains}: {rule}; give {nodes}, or change {copies.path}")
    wire = at("weight_broadcast.type")
    if c.weight_broadcast.type == "collective" and shape.gpus_per_node:
        rule = 'NCCL connects no two processes of one GPU; use "filesystem"'
        yield Problem((wire, table), f"{wire} with [{table.path}] on several nodes: {rule}")
    each = section.num_gpus
    if own.type == "multi_node":
        is_one = section.enable_expert_parallel and own.nodes_per_engine == 1  # over all nodes
        each = section.parallel.num_gpus * (1 if is_one else own.num_engines) // own.num_nodes
    elif own.type != "single_node" and own.num_nodes > 1:
        each = own.gpus_per_node
    if shape.gpus_per_node and section.device != "cpu" and each != shape.gpus_per_node:
        node, degrees = at("deployment.gpus_per_node"), at("inference.parallel")
        rule = f"the trainer takes {node} GPUs of a node and its engines {each}, and they take turns on the same"
        yield Problem((node, degrees), f"[{table.path}]: {rule}; change {degrees.path}, or their number")


def mapped_memory(c: RLConfig, at: At) -> Problems:
    """With "ipc" one engine, one process on the trainer's GPU, maps the memory of the trainer."""
    s, wire = c.inference, at("weight_broadcast.type")
    if c.weight_broadcast.type != "ipc":
        return
    is_cpu = s is not None and s.device == "cpu"
    has_several = s is not None and s.num_gpus > 1 and not is_cpu
    num_workers = c.orchestrator.num_train_workers
    for path, is_broken, why in (
        ("weight_broadcast.delta", c.weight_broadcast.delta, "copies go through the memory of the host"),
        ("deployment.type", c.deployment.type == "multi_node", "its engines are on other machines"),
        ("orchestrator.num_train_workers", num_workers > 1, "trainer and engine share one GPU, and there are several"),
        ("inference", s is None, "this run starts no engine on its GPU"),
        ("inference.device", is_cpu, "the engine has no GPU"),
        ("inference.deployment", has_several, "one process can map the memory, and there are several"),
    ):
        if is_broken:
            what = f'{wire} with {at(path).path}: {why}; use "shm" or "collective"'
            yield Problem((wire, at(path)), what)


def changes_within_a_machine(c: RLConfig, at: At) -> Problems:
    """Sending only changes costs more than sending all weights where they do not leave the machine."""
    changes, wire = at("weight_broadcast.delta"), c.weight_broadcast
    if wire.delta is not None and c.inference is not None and c.deployment.type == "single_node":
        yield Problem(
            changes,
            f"[{changes.path}]: trainer and engines are on one machine, where finding and applying changes takes "
            "longer than copying all weights does; leave it out",
        )


def hosts(cfg: Any, at: At) -> Problems:
    """Hosts that are not names or addresses of machines, or that others cannot reach."""
    key = at("hosts" if isinstance(cfg, InferenceConfig) else "deployment.hosts")
    given = key.held or ()
    for host in given:
        if not HOST.fullmatch(host):
            rule = "is no name or address of a machine; give each alone, as node-0, 10.0.0.1 or fd00::1"
            yield Problem(key, f'{key.path}: "{host}" {rule}')
    for node, host in enumerate(given):
        if is_loopback(host) and not all(map(is_loopback, given)):
            rule = f"node {node}, {host}, is reached by its own machine alone, and others are elsewhere"
            yield Problem(key, f"{key.path}: {rule}; give the address at which they reach it")


def node_rank(cfg: Any, at: At) -> Problems:
    """This node is one of the run's."""
    key = at("deployment.node_rank")
    if key.held is not None and cfg.num_nodes and key.held >= cfg.num_nodes:
        yield Problem(key, f"{key}: the {cfg.num_nodes} nodes are counted from 0")


RULES: Rules = {
    RLConfig: (
        network,
        client_address,
        device_of_engines,
        replicas,
        group_requests,
        sample_lengths,
        idle_gpus,
        ports,
        gpus,
        gpus_of_engines,
        nodes,
        nodes_of_engines,
        critic,
        teacher,
        colocation,
        mapped_memory,
        hosts,
        node_rank,
    ),
    SFTConfig: (hosts, node_rank),
    InferenceConfig: (hosts,),
}
