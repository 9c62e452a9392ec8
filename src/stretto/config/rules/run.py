"""Rules of the run itself: its name, how it starts, its wires, and what its evals are."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from stretto.base.rundir import CHECKPOINT
from stretto.base.status import STATUS_FD_VAR, SUPERVISED_VAR
from stretto.config.root import EvalConfig, EvalsConfig, OrchestratorConfig, RLConfig, RunRoot, SFTConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle, known_models
from stretto.config.sections.deployment import ResumeSection
from stretto.config.sections.distill import ModelLimits
from stretto.config.sections.inference import InferenceSection
from stretto.config.sections.orchestrator import EnvSection, OrchestratorKeys, OrchestratorSection, TrainingEvalSection
from stretto.config.sections.run import BudgetSection
from stretto.config.sections.sft import ValSection
from stretto.config.sections.trainer import TrainerKeys
from stretto.config.sections.transport import ControlSection

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]*")
PROTECTED = (
    "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", STATUS_FD_VAR,
    SUPERVISED_VAR,
)  # fmt: skip
"""Environment variables that the launcher sets for its processes."""


def launcher_variables(s: Any, at: At) -> Problems:
    """Environment variables that the launcher sets are not a user's."""
    for name in s.env_vars:
        key = at(f"env_vars.{name}")
        if name == "CUDA_VISIBLE_DEVICES":
            way = "give GPUs as trainer_gpu_ids and inference_gpu_ids"
            yield Problem(key, f"{key.path} is the launcher's to set; {way}")
        elif name in PROTECTED:
            yield Problem(key, f"{key.path} is the launcher's to set; leave it out")


def nodes_per_fsdp_group(r: RunRoot, at: At) -> Problems:
    """Groups of nodes that share the weights divide the nodes, and agree with dp_replicate."""
    shape: Any = getattr(r, "deployment", None)
    if (group := getattr(shape, "nodes_per_fsdp_group", None)) is None:
        return
    key, nodes = at("deployment.nodes_per_fsdp_group"), at("deployment.num_train_nodes")
    replicas = at("model.dp_replicate")
    copies, rest = divmod(shape.num_train_nodes, group)
    if rest:
        yield Problem((key, nodes), f"{key} must divide {nodes}")
    elif copies != replicas.held:
        what = f"{key} makes {copies} copies of the weights, but {replicas}"
        yield Problem((key, replicas), f"{what}; leave one of the two out")


def start_options(r: RunRoot, at: At) -> Problems:
    """A run's name, and how it starts."""
    name = at("run.name")
    if r.run.name is not None and not RUN_NAME.fullmatch(r.run.name):
        yield Problem(name, f"{name}: letters, digits and . _ + = @ - only, for it names a directory")
    if r.clean and r.resume is not None and r.resume.dir is None:
        what = "resume continues the run and clean deletes it; give one of the two"
        yield Problem((at("resume"), at("clean")), what)


def resumed_checkpoint(s: ResumeSection, at: At) -> Problems:
    """The checkpoint that a run begins from."""
    directory, step, skip = at("dir"), at("step"), at("skip_progress")
    named = None if s.dir is None else CHECKPOINT.search(s.dir.as_posix())
    if named and s.step not in (None, int(named[1])):
        yield Problem((directory, step), f"{directory.path} is the checkpoint of step {named[1]}, and {step}; give one")
    if s.skip_progress and s.dir is None:
        yield Problem(
            skip,
            f"{skip} begins a run of its own with what another has learned: give {directory.path} = "
            '"outputs/OTHER" and another run.name; a run that goes on in its own directory goes on at its step: leave '
            "the key out",
        )


def heartbeats(s: ControlSection, at: At) -> Problems:
    """One late heartbeat does not stop a run."""
    dead_after, interval = at("dead_after_s"), at("heartbeat_s")
    if s.heartbeat_s * 2 > s.dead_after_s:
        rule = f"{dead_after} must be at least twice {interval}, or one late heartbeat stops the run"
        yield Problem((dead_after, interval), rule)


def room_for_evals(s: Any, at: At) -> Problems:
    """A reply of an eval fits into seq_len."""
    if s.eval is None:
        return
    length = at("seq_len")
    tables = {"eval.sampling": s.eval.sampling}
    tables |= {f"eval.env.{index}.sampling": env.sampling for index, env in enumerate(s.eval.env)}
    for path, sampling in tables.items():
        reply = at(f"{path}.max_completion_tokens")
        if (sampling.max_completion_tokens or 0) > s.seq_len:
            yield Problem((reply, length), f"{reply} is more than {length}; lower it or raise seq_len")


def something_to_evaluate(s: Any, at: At) -> Problems:
    """Evals have environments."""
    envs = at("eval.env")
    if s.eval is not None and not s.eval.env:
        what = f'{envs.path}: no environment to evaluate; add one, such as [[eval.env]] id = "sort-letters"'
        yield Problem(envs, what)


def single_evals(r: EvalConfig, at: At) -> Problems:
    """What the verb `eval` does not do."""
    if not isinstance(r, EvalsConfig):
        keys = ("eval.interval", "eval.env.*.interval", "eval.skip_first_step", "eval.retrigger_on_resume")
        yield from idle(at, (*keys, "resume"), "eval", "use it in a run that trains", why="`eval` evaluates once")
    if r.model is not None:
        yield from idle(at, "client.base_url", "model", "leave model out", why="an engine is started for it")
    model, api = at("model"), at("client.api")
    if r.model is not None and r.client.api == "chat":
        rule = f"{model} starts an engine of our own, which has tokens; leave {api.path} out, or model"
        yield Problem((model, api), rule)


def scored_evals(s: TrainingEvalSection, at: At) -> Problems:
    """What follows from scores has scores to follow from."""
    score_by, greedy, stop, interval = at("score_by"), at("greedy"), at("early_stop"), at("interval")
    if s.score_by == "greedy" and not s.greedy:
        yield Problem((score_by, greedy), f"{score_by} needs greedy rollouts, and {greedy}; set it to true")
    if not s.keep_best and s.early_stop is None:
        why = "no score is compared"
        yield from idle(at, "score_by", "keep_best", "set that or early_stop", why=why)
        return
    if s.interval is None and not any(env.interval for env in s.env):
        asked = stop if s.early_stop is not None else at("keep_best")
        rule = f"{asked.path} compares evals during the run; give {interval.path}, the steps between them"
        yield Problem((asked, interval), rule)
    yield from stop_can_come(s, at)


def stop_can_come(s: TrainingEvalSection | ValSection, at: At) -> Problems:
    """An early stop has something that ends the run."""
    if s.early_stop is not None and s.early_stop.patience is None and s.early_stop.target is None:
        stop = at("early_stop")
        yield Problem(stop, f"{stop.path} has neither patience nor target, so nothing would end the run; give one")


def best_is_exported(c: RLConfig, at: At) -> Problems:
    """Weights of a version that may be the best are exported when it is evaluated."""
    section = c.orchestrator.eval
    if section is None or not section.keep_best:
        return
    keep, ckpt = at("orchestrator.eval.keep_best"), at("ckpt")
    if c.ckpt is None or c.ckpt.weights is None:
        named = ckpt if c.ckpt is None else at("ckpt.weights")
        yield Problem((keep, named), f"{keep} needs exported weights; keep [ckpt] and [ckpt.weights]")
        return
    every = c.ckpt.weights.interval or c.ckpt.interval
    evals = {own.interval for own in section.env if own.interval} or {section.interval or 0}
    for steps in sorted(filter(None, evals)):
        if every is None or steps % every:
            key = at("ckpt.weights.interval")
            now = "none but the last is" if every is None else f"only every {every} steps one is"
            rule = f"{keep} needs the weights of each version that is evaluated, and {now} exported"
            yield Problem((keep, key), f"{rule}; set {key.path} = {steps}, as eval.interval")


# -- models beside the policy --


def named_models(c: RLConfig, at: At) -> Problems:
    """What environments call frozen models are models of the run."""
    yield from _named(c.orchestrator.env, c.models, at, "orchestrator.env")
    if c.orchestrator.eval is not None:
        yield from _named(c.orchestrator.eval.env, c.models, at, "orchestrator.eval.env")


def named_models_of_eval(c: EvalConfig, at: At) -> Problems:
    """The same in `eval`."""
    yield from _named(c.eval.env, c.models, at, "eval.env")


def _named(sections: Sequence[EnvSection], models: Collection[str], at: At, path: str) -> Problems:
    for index, section in enumerate(sections):
        for name, model in section.models.items():
            if model not in models:
                key = at(f"{path}.{index}.models.{name}")
                yield Problem(key, f"{key}: this run has no such model; {known_models(models, model)}")


# -- the budget --


def bounded(s: BudgetSection, at: At) -> Problems:
    """A budget bounds something, and a cost has prices."""
    if not s.bounds and not s.prices.is_any:
        keys = [at(key) for key in ("max_hours", "max_tokens", "max_cost")]
        names = f"{keys[0].path}, {keys[1].path} or {keys[2].path}"
        yield Problem(tuple(keys), f"a budget without a bound ends nothing; give {names}, or leave the table out")


def priced(r: RLConfig | OrchestratorConfig | SFTConfig, at: At) -> Problems:
    """A bound of costs has something that costs."""
    if r.budget is None or r.budget.max_cost is None or r.budget.prices.is_any:
        return
    if any(limits.prompt_price or limits.reply_price for limits in _asked_models(r)):
        return
    cost, hour = at("budget.max_cost"), at("budget.prices.hour")
    rule = f"{cost} and nothing has a price, so nothing would end the run; give {hour.path} (an hour of all machines)"
    yield Problem((cost, hour), f"{rule}, or prices.sampled_tokens and prices.trained_tokens (a million each)")


def _asked_models(r: RLConfig | OrchestratorConfig | SFTConfig) -> Sequence[ModelLimits]:
    """How the frozen models of a run are asked."""
    if isinstance(r, RLConfig):
        return [model.client for model in r.models.values()]
    return [] if isinstance(r, SFTConfig) else list(r.frozen_models.values())


def budget_saves(r: RLConfig | SFTConfig, at: At) -> Problems:
    """A run that its budget ends can go on."""
    if r.budget is not None and r.budget.bounds and r.ckpt is None:
        first, ckpt = at(f"budget.{next(iter(r.budget.bounds))}"), at("ckpt")
        what = f"{first} ends the run, and with {ckpt} it cannot go on then, nor are its weights kept"
        yield Problem((first, ckpt), f"{what}; leave ckpt out")


RULES: Rules = {
    BudgetSection: (bounded,),
    RLConfig: (best_is_exported, named_models, priced),
    TrainingEvalSection: (scored_evals,),
    ValSection: (stop_can_come,),
    TrainerKeys: (launcher_variables,),
    OrchestratorKeys: (launcher_variables,),
    InferenceSection: (launcher_variables,),
    RunRoot: (launcher_variables, nodes_per_fsdp_group, start_options),
    ResumeSection: (resumed_checkpoint,),
    ControlSection: (heartbeats,),
    OrchestratorSection: (room_for_evals,),
    SFTConfig: (room_for_evals, something_to_evaluate, priced),
    OrchestratorConfig: (priced,),
    EvalConfig: (named_models_of_eval, room_for_evals, something_to_evaluate, single_evals),
}
