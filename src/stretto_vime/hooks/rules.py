"""Rules of [orchestrator.hooks] and [trainer.hooks]: what functions do not go with, and what they replace."""

from __future__ import annotations

from stretto.config.root import OrchestratorConfig, RLConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle, matching
from stretto.config.sections.distill import WITHOUT_REWARD
from stretto.config.sections.hooks import ENVIRONMENTS
from stretto.config.sections.orchestrator import OrchestratorKeys
from stretto.config.sections.trainer import TrainerKeys, TrainerSection


def own_functions(s: OrchestratorKeys, at: At) -> Problems:
    """Functions that are given go with evals, with each other, and with what they replace."""
    if s.hooks.is_empty:
        yield from idle(at, "hooks.args", "hooks", "name one", why="no function is named")
    if s.eval is None:
        keys = ("hooks.eval_function", "hooks.eval_log")
        yield from idle(at, keys, "eval", "add [eval]", why="there are no evals")
    evaluates, plays = at("hooks.eval_function"), at("hooks.rollout_function")
    if s.eval and s.hooks.eval_function == ENVIRONMENTS and s.hooks.rollout_function is None:
        what = f"{evaluates} is what happens without {plays.path}; leave it out"
        yield Problem((evaluates, plays), what)
    if s.hooks.rollout_function is not None:
        why = "it samples by itself"
        yield from idle(at, "env.*.sampling.*", "hooks.rollout_function", "name none", why=why)


def batches_of_rollouts(s: OrchestratorKeys, at: At) -> Problems:
    """Functions that make or choose batches count rollouts, not tokens."""
    reasons = {
        "rollout_function": "its calls are batches of batch_size rollouts",
        "buffer_filter": "it chooses batch_size rollouts",
    }
    for key, why in reasons.items():
        if getattr(s.hooks, key) is not None:
            yield from idle(at, "token_batch_size", f"hooks.{key}", "leave one of them out", why=why)


def replaced_settings(s: OrchestratorKeys, at: At) -> Problems:
    """Functions that would do nothing, and settings that functions replace."""
    hooks, plays = s.hooks, at("hooks.rollout_function")
    for index, env in enumerate(s.env):
        algo, size = (env.algo or s.algo).type, at(f"env.{index}.group_size")
        for key in ("reward_post_process", "rollout_function"):
            # Saved rollouts may have a teacher's numbers.
            has_saved = key == "rollout_function" and s.debug == "training"
            if algo in WITHOUT_REWARD and getattr(hooks, key) is not None and not has_saved:
                hook, name = at(f"hooks.{key}"), env.name or env.id
                rule = f'does nothing for {name}: its algo "{algo}" learns from a teacher, not from rewards'
                yield Problem(hook, f"{hook.path} {rule}; leave one of them out")
        if hooks.rollout_function is not None and env.group_size not in (None, s.group_size):
            yield Problem(size, f"{size}: {plays.path} gets groups of one size; leave it out")
    if s.eval is None or hooks.eval_setting is None:
        return
    makes = at(f"hooks.{hooks.eval_setting}")
    for pattern in ("eval.env.*.group_size", "eval.env.*.sampling"):
        for path, value, default in matching(s, pattern):
            if value != default:
                unused = at(path)
                yield Problem(unused, f"{unused.path} does nothing: {makes.path} makes the evals; leave it out")


def credit_hooks(s: OrchestratorKeys, at: At) -> Problems:
    """Hooks that give a sample one advantage leave none to its turns."""
    is_run_algo_used = not s.env or any(env.algo is None for env in s.env)
    for pattern in ("env.*.algo.turns", *["algo.turns"] * is_run_algo_used):
        for path, turns, _ in matching(s, pattern):
            for name in ("reward_post_process", "convert_samples_to_train_data") if turns is not None else ():
                hook, key = at(f"hooks.{name}"), at(path)
                if hook.held is not None:
                    what = f"{hook} gives each sample one advantage, in the place of those of its turns"
                    yield Problem((hook, key), f"{what} ({key.path}); leave one of them out")


def clock(c: RLConfig | OrchestratorConfig, at: At) -> Problems:
    """Batches of a deterministic run are not those of whatever a function has made first."""
    path = "orchestrator.hooks" if isinstance(c, RLConfig) else "hooks"
    key, switch = at(f"{path}.rollout_function"), at("deterministic")
    if c.deterministic and key.held is not None:
        rule = f"{key} makes batches of whatever is done first, and {switch} allows no such thing"
        yield Problem((key, switch), f"{rule}; leave one of them out")


def own_loss(s: TrainerKeys, at: At) -> Problems:
    """A loss of the user's is the whole loss."""
    if s.hooks.loss is None:
        return
    keys = ("hooks.tis", "hooks.pg_loss_reducer", "loss.entropy_coef", "loss.reference_kl", "loss.correction")
    yield from idle(at, keys, "hooks.loss", "leave that out", why="it is the whole loss")
    hook, kind = at("hooks.loss"), at("loss.type")
    if s.loss.type == "custom":
        yield Problem((hook, kind), f"{hook} and {kind} are two losses of your own; leave one of them out")


def own_layers(s: TrainerSection, at: At) -> Problems:
    """What a user's functions of the trainer do not go with."""
    writes, wire, model, values = map(at, ("hooks.post_write", "weight_broadcast.type", "hooks.model", "critic"))
    if s.hooks.post_write is not None and s.weight_broadcast.type != "filesystem":
        what = "is called when the files of a version are written"
        yield Problem((writes, wire), f'{writes} {what}, and {wire} writes none; use type = "filesystem"')
    if s.hooks.model is None:
        return
    for axis in ("tp", "cp", "ep"):
        degree = at(f"model.{axis}")
        if degree.held not in (1, "auto"):
            what = f"{model} changes whole layers, and {degree} cuts them; use ranks of their own instead"
            yield Problem((model, degree), f"{what}, num_train_workers")
    if s.critic is not None:
        what = f"{model} changes the policy, and [{values.path}] would be another model; leave one of them out"
        yield Problem((model, values), what)


RULES: Rules = {
    OrchestratorKeys: (own_functions, batches_of_rollouts, replaced_settings, credit_hooks),
    TrainerKeys: (own_loss,),
    TrainerSection: (own_layers,),
    RLConfig: (clock,),
    OrchestratorConfig: (clock,),
}
