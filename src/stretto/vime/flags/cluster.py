"""Flags about GPUs: who gets how many, and where."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.base.errors import ConfigError
from stretto.vime.flags.flag import Flag, Setting, Values, equal, part, refused

NO_CRITIC_GPUS = (
    "the critic is trained by the actor's ranks and has no GPUs of its own; leave it out, and give the actor the "
    "memory "
    "for both"
)
NO_COLOCATION = (
    "trainer and engines do not take turns on a GPU; give each GPUs of its own: --actor-num-gpus-per-node and "
    "--rollout-num-gpus"
)
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
        refused("--colocate", "switch", False, NO_COLOCATION, "Trainer and engines share their GPUs."),
        refused("--offload", "switch", False, NO_COLOCATION, "--offload-train and --offload-rollout."),
        refused("--offload-train", "switch", False, NO_COLOCATION, "Put the trainer's memory away during rollouts."),
        refused("--offload-rollout", "switch", False, NO_COLOCATION, "Put the engines' memory away during training."),
        equal("--no-offload", "switch", False, "Nothing is put away.", "Neither."),
        equal("--no-offload-train", "switch", False, "Nothing is put away.", "Keep the trainer's memory."),
        equal("--no-offload-rollout", "switch", False, "Nothing is put away.", "Keep the engines' memory."),
        refused("--critic-num-nodes", "integer", None, NO_CRITIC_GPUS, "Nodes of the critic's training."),
        refused("--critic-num-gpus-per-node", "integer", None, NO_CRITIC_GPUS,
             "GPUs per node of the critic's training."),
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
    num_engines, per_engine = count_engines(flags)
    train_gpus, node = flags.actor_num_gpus_per_node, flags.num_gpus_per_node
    infer_gpus = num_engines * per_engine if flags.rollout_num_gpus else 0
    shards = flags.vllm_pipeline_parallel_size * flags.vllm_data_parallel_size
    if per_engine % shards:
        raise ConfigError(
            f"{_typed(flags, ENGINES[1])}: its pipeline and data parallel sizes, {shards} together, must divide it"
        )
    yield Setting("inference.parallel.tp", per_engine // shards, ENGINES[1:])
    if flags.actor_num_nodes == 1 and train_gpus + infer_gpus <= node:
        yield Setting("deployment.num_train_gpus", train_gpus, ("--actor-num-gpus-per-node",))
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
    yield Setting("deployment.num_infer_replicas", infer_gpus // per_node, ENGINES)
    yield Setting("inference.deployment.num_replicas", per_node // per_engine, ENGINES)
    yield Setting("ray", {}, ("--actor-num-nodes",))
    if flags.save is None:  # without checkpoints it would begin anew
        yield Setting("ray.max_restarts", 0, ("--save",))


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
