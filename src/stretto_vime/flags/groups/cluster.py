"""Flags about GPUs: who gets how many, and where."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.base.errors import ConfigError
from stretto_vime.flags.flag import Flag, Setting, Values, equal, part, sets
from stretto_vime.flags.placement import ENGINES, count_engines, degrees, on_one_node, over_nodes

TURNS = "colocate.offload_train colocate.offload_rollout"
CRITIC = ("--critic-num-nodes", "--critic-num-gpus-per-node")
DEPLOYMENT = "deployment.type deployment.num_train_nodes deployment.num_infer_replicas ray"

# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "Cluster resource allocation": (
        part("--actor-num-nodes", "integer", 1, DEPLOYMENT, "Nodes of the actor's training.",
             note="Several nodes are those of a Ray cluster."),
        sets("--actor-num-gpus-per-node", "integer", 8, "deployment.num_train_gpus deployment.gpus_per_node",
             "GPUs per node of the actor's training.", note="0 on one node: the CPU."),
        sets("--rollout-num-gpus", "integer", None,
             f"deployment.num_infer_gpus inference.deployment.num_replicas {DEPLOYMENT}", "GPUs of all engines.",
             note="0, with 0 GPUs of the actor: one engine on the CPU."),
        part("--rollout-num-gpus-per-engine", "integer", 1,
             "inference.parallel.tp inference.deployment.num_replicas inference.deployment.type "
             "inference.deployment.num_nodes inference.deployment.nodes_per_engine",
             "GPUs of one engine; there are --rollout-num-gpus / --rollout-num-gpus-per-engine of them.",
             note="More than --num-gpus-per-node: whole nodes, which share its tensor parallel ranks, or with "
                  "--vllm-enable-expert-parallel divide its data-parallel ones."),
        part("--num-gpus-per-node", "integer", 8,
             f"inference.deployment.num_replicas inference.deployment.gpus_per_node {DEPLOYMENT}", "GPUs of a node."),
        part("--prefill-num-servers", "integer", None, "inference.deployment",
             "Engines that read prompts; the others write replies.",
             note="Both kinds are on one node, or each has whole nodes. For kinds of different sizes use "
                  "--vllm-config."),
        part("--colocate", "switch", False, f"{TURNS} trainer_gpu_ids inference_gpu_ids",
             "Trainer and engines share their GPUs and take turns; --rollout-num-gpus is ignored.",
             note="A critic shares the actor's GPUs. Over several nodes weights travel as files that all nodes see."),
        part("--offload", "switch", False, TURNS, "--offload-train and --offload-rollout.", note="With --colocate."),
        part("--offload-train", "switch", False, TURNS, "Free the trainer's GPU memory during rollouts.",
             note="Only with --colocate, where it is the default."),
        part("--offload-rollout", "switch", False, TURNS, "Free the engines' GPU memory during training.",
             note="Only with --colocate, where it is the default."),
        part("--no-offload", "switch", False, TURNS, "Keep the memory of trainer and engines.",
             note="Not with --colocate."),
        part("--no-offload-train", "switch", False, TURNS, "Keep the trainer's memory."),
        part("--no-offload-rollout", "switch", False, TURNS, "Keep the engines' memory."),
        part("--critic-num-nodes", "integer", None, "deployment.num_critic_nodes",
             "Nodes of the critic's training; without it as many as the actor's.",
             note="The critic is on the actor's nodes if both fit there."),
        part("--critic-num-gpus-per-node", "integer", None,
             "deployment.num_critic_gpus deployment.critic_gpus_per_node trainer.critic.placement.num_workers",
             "GPUs per node of the critic's training; without it as many as the actor's.",
             note="They must divide the actor's. 0, with 0 GPUs of the actor: the CPU."),
        equal("--distributed-backend", "text", "nccl", "NCCL on GPUs, gloo on CPUs.", "Backend of collectives.",
              choices=("nccl", "gloo")),
        equal("--distributed-timeout-minutes", "integer", 10,
              "Every wait has a deadline in the config: `batch_timeout_s`, `weight_broadcast.timeout_s` and others.",
              "Longest wait of a collective."),
        sets("--train-env-vars", "object", {}, "trainer.env_vars", "Environment variables of the actor."),
        equal("--train-memory-margin-bytes", "integer", 1 << 30, "No margin is needed.",
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
    if flags.train_env_vars:
        yield from flags.settings("--train-env-vars")
    found = count_engines(flags)
    train_gpus, node = flags.actor_num_gpus_per_node, flags.num_gpus_per_node
    infer_gpus = sum(engines.number * engines.gpus for engines in found) if flags.rollout_num_gpus else 0
    yield from degrees(flags, found)
    critic_nodes, critic_gpus = count_critic(flags)
    if is_on_one_node(flags):
        yield Setting("deployment.num_train_gpus", train_gpus, ("--actor-num-gpus-per-node",))
        if critic_nodes and critic_gpus:
            yield Setting("deployment.num_critic_gpus", critic_gpus, CRITIC[1:])
        elif critic_nodes:
            yield Setting("trainer.critic.placement.num_workers", 1, CRITIC[1:])
        yield Setting("deployment.num_infer_gpus", infer_gpus, ENGINES[:1])
        yield from on_one_node(flags, found)
        return
    if not train_gpus or not infer_gpus:
        raise ConfigError(
            f"{flags.typed('--actor-num-nodes', '--actor-num-gpus-per-node', *ENGINES)}: over several nodes both "
            "need GPUs"
        )
    yield Setting("deployment.type", "multi_node", ("--actor-num-nodes", *ENGINES[:1]))
    yield Setting("deployment.num_train_nodes", flags.actor_num_nodes, ("--actor-num-nodes",))
    yield Setting("deployment.gpus_per_node", train_gpus, ("--actor-num-gpus-per-node",))
    if critic_nodes:
        yield Setting("deployment.critic_gpus_per_node", critic_gpus, CRITIC[1:])
        if critic_nodes != flags.actor_num_nodes or train_gpus + critic_gpus > node:
            yield Setting("deployment.num_critic_nodes", critic_nodes, CRITIC[:1])
    yield from over_nodes(flags, found)
    if any(not model.is_updated and model.num_gpus for model in flags.models):
        yield Setting("deployment.model_gpus_per_node", node, ("--num-gpus-per-node", "--vllm-config"))
    yield Setting("ray", {}, ("--actor-num-nodes",))
    if flags.save is None:  # without checkpoints it would begin anew
        yield Setting("ray.max_restarts", 0, ("--save",))


def is_on_one_node(flags: Values) -> bool:
    """Whether actor, critic, all engines and the GPUs of placeholders fit one node."""
    nodes, gpus = count_critic(flags)
    if flags.actor_num_nodes > 1 or nodes > 1:
        return False
    beside = sum(group.num_gpus for model in flags.models for group in model.groups)
    if not flags.models:
        beside = flags.rollout_num_gpus
    if flags.colocate:
        beside = sum(model.num_gpus for model in flags.models if not model.is_updated)
    return flags.actor_num_gpus_per_node + gpus * nodes + beside <= flags.num_gpus_per_node


def _turns(flags: Values) -> Iterator[Setting]:
    """[colocate].

    Raises: ConfigError for a critic's own GPUs, and turns in which no process would free memory.
    """
    actors = dict(zip(CRITIC, (flags.actor_num_nodes, flags.actor_num_gpus_per_node)))
    if given := [name for name in CRITIC if flags.value(name) not in (None, actors[name])]:
        raise ConfigError(
            f"{flags.typed('--colocate', *given)}: the critic takes its turn with the actor, on the same GPUs; "
            "leave it out"
        )
    for part_name in ("train", "rollout"):
        names = (f"--no-offload-{part_name}", "--no-offload")
        keeps = [name for name in names if flags.has(name)]
        if keeps and flags.has(f"--offload-{part_name}"):
            raise ConfigError(f"{flags.typed(f'--offload-{part_name}', keeps[0])}: leave one of them out")
        yield Setting(f"colocate.offload_{part_name}", not keeps, ("--colocate", *keeps))
    if flags.lora_rank:  # an update is the adapter alone, so that engines keep the weights below it
        yield Setting("colocate.sleep_level", 1, ("--colocate", "--lora-rank"))


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
        raise ConfigError(f"{flags.typed(*names)}: both are on GPUs, or both on the CPU; change one of them")
    if gpus > flags.num_gpus_per_node:
        raise ConfigError(
            f"{flags.typed('--critic-num-gpus-per-node', '--num-gpus-per-node')}: a node has not that many; lower "
            "it, and raise --critic-num-nodes"
        )
    total, policy = nodes * gpus, flags.actor_num_nodes * flags.actor_num_gpus_per_node
    if total and policy % total:
        given = filter(flags.has, CRITIC)
        names = (*given, "--actor-num-nodes", "--actor-num-gpus-per-node")
        raise ConfigError(
            f"{flags.typed(*names)}: the critic's {total} GPUs must divide the actor's {policy}; leave its own "
            "out for as many"
        )
    return nodes, gpus
