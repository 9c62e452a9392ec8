"""Flags about GPUs: who gets how many, and where."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.base.errors import ConfigError
from stretto.vime.flags.flag import Flag, Setting, Values, equal, part, refused

TURNS = "colocate.offload_train colocate.offload_rollout"
CRITIC = ("--critic-num-nodes", "--critic-num-gpus-per-node")
ENGINES = ("--rollout-num-gpus", "--rollout-num-gpus-per-engine")
DEPLOYMENT = "deployment.type deployment.num_train_nodes deployment.num_infer_replicas ray"

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Cluster resource allocation": (
        part("--actor-num-nodes", "integer", 1, DEPLOYMENT, "Nodes of the actor's training.",
             note="Several nodes are those of a Ray cluster."),
        part("--actor-num-gpus-per-node", "integer", 8, "deployment.num_train_gpus deployment.gpus_per_node",
             "GPUs per node of the actor's training.", note="0 on one node: the CPU."),
        part("--rollout-num-gpus", "integer", None,
             f"deployment.num_infer_gpus inference.deployment.num_replicas {DEPLOYMENT}",
             "GPUs of all engines.", note="0 beside 0 GPUs of the actor: one engine on the CPU."),
        part("--rollout-num-gpus-per-engine", "integer", 1, "inference.parallel.tp inference.deployment.num_replicas",
             "GPUs of one engine; there are --rollout-num-gpus / --rollout-num-gpus-per-engine of them.",
             note="An engine over several nodes is refused."),
        part("--num-gpus-per-node", "integer", 8, f"inference.deployment.num_replicas {DEPLOYMENT}",
             "GPUs of a node."),
        part("--prefill-num-servers", "integer", None, "inference.deployment",
             "Engines that read prompts; the others write replies.", note="On one node."),
        part("--colocate", "switch", False, f"{TURNS} trainer_gpu_ids inference_gpu_ids",
             "Trainer and engines share their GPUs and take turns; --rollout-num-gpus is ignored.",
             note="On one node; with a critic on the actor's GPUs."),
        part("--offload", "switch", False, TURNS, "--offload-train and --offload-rollout.", note="With --colocate."),
        part("--offload-train", "switch", False, TURNS, "Put the trainer's memory away during rollouts.",
             note="With --colocate, where it is so by default."),
        part("--offload-rollout", "switch", False, TURNS, "Put the engines' memory away during training.",
             note="With --colocate, where it is so by default."),
        part("--no-offload", "switch", False, TURNS, "Neither is put away.", note="Not with --colocate."),
        part("--no-offload-train", "switch", False, TURNS, "Keep the trainer's memory."),
        part("--no-offload-rollout", "switch", False, TURNS, "Keep the engines' memory."),
        part("--critic-num-nodes", "integer", None, "deployment.num_critic_nodes",
             "Nodes of the critic's training; else as many as the actor's.",
             note="On the actor's nodes where both fit there."),
        part("--critic-num-gpus-per-node", "integer", None,
             "deployment.num_critic_gpus deployment.critic_gpus_per_node trainer.critic.placement.num_workers",
             "GPUs per node of the critic's training; else as many as the actor's.",
             note="They divide the actor's; 0 beside 0 GPUs of the actor: the CPU."),
        equal("--distributed-backend", "text", "nccl", "NCCL on GPUs, gloo on CPUs.", "Backend of collectives.",
              choices=("nccl",)),
        equal("--distributed-timeout-minutes", "integer", 10,
              "Every wait has a deadline in the config: `batch_timeout_s`, `weight_broadcast.timeout_s` and others.",
              "Longest wait of a collective."),
        refused("--train-env-vars", "object", {},
                "processes have the environment of the command; export the variables before it",
                "Environment variables of the actor."),
        equal("--train-memory-margin-bytes", "integer", 1 << 30, "Nothing is put away, so that no margin is needed.",
              "Memory that the trainer leaves free."),
    ),
}
# fmt: on


def settings(flags: Values) -> Iterator[Setting]:
    """Where trainer and engines run.

    Raises: ConfigError for GPUs that do not make whole engines, or engines that do not fit their nodes.
    """
    if flags.colocate:
        yield from _turns(flags)
    num_engines, per_engine = count_engines(flags)
    train_gpus, node = flags.actor_num_gpus_per_node, flags.num_gpus_per_node
    infer_gpus = num_engines * per_engine if flags.rollout_num_gpus else 0
    shards = flags.vllm_pipeline_parallel_size * flags.vllm_data_parallel_size
    if per_engine % shards:
        raise ConfigError(
            f"{_typed(flags, ENGINES[1])}: its pipeline and data parallel sizes, {shards} together, must divide it"
        )
    yield Setting("inference.parallel.tp", per_engine // shards, ENGINES[1:])
    critic_nodes, critic_gpus = count_critic(flags)
    is_one = flags.actor_num_nodes == 1 and critic_nodes in (0, 1)
    beside = 0 if flags.colocate else infer_gpus
    if is_one and train_gpus + critic_gpus * critic_nodes + beside <= node:
        yield Setting("deployment.num_train_gpus", train_gpus, ("--actor-num-gpus-per-node",))
        if critic_nodes and critic_gpus:
            yield Setting("deployment.num_critic_gpus", critic_gpus, CRITIC[1:])
        elif critic_nodes:
            yield Setting("trainer.critic.placement.num_workers", 1, CRITIC[1:])
        yield Setting("deployment.num_infer_gpus", infer_gpus, ENGINES[:1])
        yield from _engines_of_a_node(flags, num_engines)
        return
    if not train_gpus or not infer_gpus:
        raise ConfigError(
            f"{_typed(flags, '--actor-num-nodes', '--actor-num-gpus-per-node', *ENGINES)}: over several nodes both "
            f"need "
            "GPUs"
        )
    if flags.prefill_num_servers is not None:
        raise ConfigError(
            f"{_typed(flags, '--prefill-num-servers')}: engines that read prompts and engines that write replies are "
            'placed on one node only; over several, write inference.deployment.type = "disaggregated" in the TOML of '
            "--print-config"
        )
    per_node = min(node, infer_gpus)
    if infer_gpus % per_node or per_node % per_engine:
        raise ConfigError(
            f"{_typed(flags, *ENGINES, '--num-gpus-per-node')}: engines of {per_engine} GPUs must fill whole nodes of "
            f"{per_node}; change one of them"
        )
    yield Setting("deployment.type", "multi_node", ("--actor-num-nodes", *ENGINES[:1]))
    yield Setting("deployment.num_train_nodes", flags.actor_num_nodes, ("--actor-num-nodes",))
    yield Setting("deployment.gpus_per_node", train_gpus, ("--actor-num-gpus-per-node",))
    if critic_nodes:
        yield Setting("deployment.critic_gpus_per_node", critic_gpus, CRITIC[1:])
        if critic_nodes != flags.actor_num_nodes or train_gpus + critic_gpus > node:
            yield Setting("deployment.num_critic_nodes", critic_nodes, CRITIC[:1])
    if per_node > train_gpus:
        yield Setting("deployment.infer_gpus_per_node", per_node, ENGINES)
    yield Setting("deployment.num_infer_replicas", infer_gpus // per_node, ENGINES)
    yield Setting("inference.deployment.num_replicas", per_node // per_engine, ENGINES)
    yield Setting("ray", {}, ("--actor-num-nodes",))
    if flags.save is None:  # without checkpoints it would begin anew
        yield Setting("ray.max_restarts", 0, ("--save",))


def _turns(flags: Values) -> Iterator[Setting]:
    """[colocate].

    Raises: ConfigError for several nodes, a critic's own GPUs, and turns in which nobody puts memory away.
    """
    if flags.actor_num_nodes > 1:
        raise ConfigError(
            f"{_typed(flags, '--colocate', '--actor-num-nodes')}: trainer and engines take turns on one node; leave "
            "one of them out"
        )
    if given := list(filter(flags.has, CRITIC)):
        raise ConfigError(
            f"{_typed(flags, '--colocate', *given)}: the critic takes its turn with the actor; leave it out"
        )
    for part_name in ("train", "rollout"):
        names = (f"--no-offload-{part_name}", "--no-offload")
        keeps = [name for name in names if flags.has(name)]
        if keeps and flags.has(f"--offload-{part_name}"):
            raise ConfigError(f"{_typed(flags, f'--offload-{part_name}', keeps[0])}: leave one of them out")
        yield Setting(f"colocate.offload_{part_name}", not keeps, ("--colocate", *keeps))


def count_critic(flags: Values) -> tuple[int, int]:
    """Nodes of a critic, and GPUs on each; no nodes without a critic.

    Raises: ConfigError if one of actor and critic is on GPUs and the other is not.
    """
    if flags.advantage_estimator != "ppo" or flags.colocate:  # whose critic takes its turn with the actor
        return 0, 0
    nodes, gpus = flags.critic_num_nodes, flags.critic_num_gpus_per_node
    nodes = flags.actor_num_nodes if nodes is None else nodes
    gpus = flags.actor_num_gpus_per_node if gpus is None else gpus
    if bool(gpus) != bool(flags.actor_num_gpus_per_node):
        names = ("--actor-num-gpus-per-node", *filter(flags.has, CRITIC[1:]))
        raise ConfigError(
            f"{_typed(flags, *names)}: both are on GPUs, or both on the CPU; change one of them"
        )
    if gpus > flags.num_gpus_per_node:
        raise ConfigError(
            f"{_typed(flags, '--critic-num-gpus-per-node', '--num-gpus-per-node')}: a node has not that many; lower "
            "it, and raise --critic-num-nodes"
        )
    total, policy = nodes * gpus, flags.actor_num_nodes * flags.actor_num_gpus_per_node
    if total and policy % total:
        given = filter(flags.has, CRITIC)
        names = (*given, "--actor-num-nodes", "--actor-num-gpus-per-node")
        raise ConfigError(
            f"{_typed(flags, *names)}: the critic's {total} GPUs must divide the actor's {policy}; leave its own "
            "out for as many"
        )
    return nodes, gpus


def count_engines(flags: Values) -> tuple[int, int]:
    """How many engines there are, and how many GPUs each has.

    Raises: ConfigError if that is no whole number, or an engine does not fit a node.
    """
    total, each, node = flags.rollout_num_gpus, flags.rollout_num_gpus_per_engine, flags.num_gpus_per_node
    if total == 0 and flags.actor_num_gpus_per_node:
        raise ConfigError(
            f"{_typed(flags, '--rollout-num-gpus')}: without engines nothing is sampled; use a number of GPUs, or "
            f"engines "
            'that run already: inference = "None" in the TOML of --print-config'
        )
    if total == 0:
        return 1, 1
    if each > node:
        raise ConfigError(
            f"{_typed(flags, ENGINES[1])}: an engine has at most the GPUs of a node, --num-gpus-per-node {node}; "
            f"several "
            'nodes for one engine are inference.deployment.type = "multi_node" in the TOML of --print-config'
        )
    if total % each:
        raise ConfigError(
            f"{_typed(flags, *ENGINES)}: {total} GPUs are no whole number of engines of {each}; use "
            f"{total - total % each or each} or {total - total % each + each} GPUs"
        )
    return total // each, each


def _engines_of_a_node(flags: Values, num_engines: int) -> Iterator[Setting]:
    prefill = flags.prefill_num_servers
    if prefill is None:
        yield Setting("inference.deployment.num_replicas", num_engines, ENGINES)
        return
    if not 0 < prefill < num_engines:
        raise ConfigError(
            f"{_typed(flags, '--prefill-num-servers', *ENGINES)}: of {num_engines} engines at least one must read "
            f"prompts "
            "and one write replies"
        )
    names = ("--prefill-num-servers", *ENGINES)
    yield Setting("inference.deployment.type", "disaggregated", names[:1])
    yield Setting("inference.deployment.is_local", True, names[:1])
    yield Setting("inference.deployment.num_prefill_replicas", prefill, names[:1])
    yield Setting("inference.deployment.num_decode_replicas", num_engines - prefill, names)


def _typed(flags: Values, *names: str) -> str:
    """The flags as they were typed, those that were not with vime's default."""
    return ", ".join(
        flags.given.get(name)
        or f"{name} {getattr(flags, name.removeprefix('--').replace('-', '_'))} (the default)"
        for name in names
    )
