"""Rules of [trainer.critic], for configs that have it."""

from __future__ import annotations

import math

from stretto.config.root import RLConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle, valid_divisors
from stretto.config.sections.trainer import TrainerKeys, TrainerSection


def values(s: TrainerKeys, at: At) -> Problems:
    """Its values are used, and each of its settings does something."""
    if s.critic is None:
        return
    rate, optim = at("critic.lr"), at("critic.optim")
    if s.critic.lr and s.critic.optim is not None:
        yield Problem((rate, optim), f"{rate} beside [{optim.path}]: give the rate there, as {optim.path}.lr")
    if s.advantages is None or s.advantages.type != "gae":
        section, table = at("critic"), at("advantages")
        what = f'trains values that are not used; add [{table.path}] with type = "gae", or drop it'
        yield Problem((section, table), f"{section.path} {what}")
    if s.updates_per_step * s.epochs_per_step == 1:
        why = "one update per step: nothing has moved"
        yield from idle(at, "critic.value_clip", "updates_per_step", "raise that", why=why)


def network(s: TrainerSection, at: At) -> Problems:
    """Its network has a value output, and the policy learns, too."""
    if s.critic is None:
        return
    section, impl, alone, model = map(at, ("critic", "model.impl", "critic.num_critic_only_steps", "hooks.model"))
    if s.hooks.model is not None:
        what = f"{model} changes the policy, and [{section.path}] would be another model; leave one of them out"
        yield Problem((model, section), what)
    if s.model.impl == "hf":
        what = f'needs a network of our own: {impl} has no value output; use impl = "custom"'
        yield Problem((section, impl), f"{section.path} {what}")
    if s.critic.num_critic_only_steps >= (s.max_steps or math.inf):
        steps = at("max_steps")
        yield Problem((alone, steps), f"{alone} must be below {steps}, or the policy never learns; lower it")


def megatron(s: TrainerSection, at: At) -> Problems:
    """Megatron updates it with its own optimizer, and recomputes what one of both says."""
    if s.critic is None or s.backend != "megatron":
        return
    kind, section = at("critic.optim.type"), at("critic.ac")
    if s.critic.optim is not None and s.critic.optim.type != "adamw":
        yield Problem(kind, f'{kind} with {at("backend")}: its optimizer is AdamW; use type = "adamw"')
    if s.critic.ac is not None and s.megatron is not None:
        for name in filter(lambda each: each.startswith("recompute_"), s.megatron.overrides):
            given = at(f"megatron.overrides.{name}")
            rule = "arguments of Megatron's come last, for policy and critic; leave one of them out"
            yield Problem((section, given), f"[{section.path}] with {given.path}: {rule}")


def ranks(c: RLConfig, at: At) -> Problems:
    """Ranks of its own: their number divides the policy's, and it has as many GPUs."""
    if c.critic_placement is None:
        return
    place, ids, number = map(at, ("trainer.critic.placement", "critic_gpu_ids", "deployment.num_critic_gpus"))
    workers, policy = at("trainer.critic.placement.num_workers"), at("orchestrator.num_train_workers")
    if valid := valid_divisors(c.orchestrator.num_train_workers, c.critic_placement.num_workers):
        rule = f"each of its ranks has the batches of as many of the policy's; valid: {valid}"
        yield Problem((workers, policy), f"{workers} does not divide {policy}: {rule}")
    gpus = len(ids.held) if ids.held else number.held
    if gpus and gpus != c.num_critic_ranks:
        key = ids if ids.held else number
        stages = " x trainer.megatron.pp" if c.trainer.megatron is not None else ""
        way = f"give {c.num_critic_ranks} (num_workers x model.cp x model.tp{stages}), or leave num_workers out"
        yield Problem((workers, key), f"{workers} but {key.path} gives {gpus} GPUs; {way}")
    for other in (at("trainer_gpu_ids"), at("inference_gpu_ids")):
        if shared := sorted({*(ids.held or ())} & {*(other.held or ())}):
            what = f"share GPU {', '.join(map(str, shared))}, and both compute at once"
            way = f"give the critic others, or leave {place.path} out"
            yield Problem((ids, other), f"{ids} and {other} {what}; {way}")
    yield from _nodes(c, at)
    if c.colocate is not None:
        table = at("colocate")
        rule = "a critic on ranks of its own takes no turns; leave it out: then it is on the trainer's ranks"
        yield Problem((place, table), f"[{place.path}] with [{table.path}]: {rule}")


def _nodes(c: RLConfig, at: At) -> Problems:
    shape, workers = c.deployment, at("trainer.critic.placement.num_workers")
    if shape.type != "multi_node":
        return
    each, nodes = shape.critic_gpus_per_node, shape.num_critic_nodes or shape.num_train_nodes
    count = shape.gpus_per_node if each is None else each
    needed, own, node = nodes * max(1, count), at("deployment.critic_gpus_per_node"), at("deployment.gpus_per_node")
    if bool(count) != bool(shape.gpus_per_node):
        rule = "trainer and critic are both on GPUs, or both on CPUs; make them agree"
        yield Problem((own, node), f"{own} with {node}: {rule}")
    elif c.num_critic_ranks != needed:
        rule = f"its {nodes} nodes of {count} GPUs make {needed} ranks; leave num_workers out"
        yield Problem(workers, f"{workers}: {rule}")


RULES: Rules = {TrainerKeys: (values,), TrainerSection: (network, megatron), RLConfig: (ranks,)}
