"""Conditions between keys of `sft` alone; those that it shares with `rl` are in config/rules."""

from __future__ import annotations

from typing import Any

from stretto.config.root import SFTConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle, value_of
from stretto.config.sections.sft import DpoSection, RewardSection, SourceData


def whole_run(s: SFTConfig, at: At) -> Problems:
    """Length, roles, evals and GPUs of `sft`."""
    if s.max_steps is None and s.max_epochs is None:
        keys = at("max_steps"), at("max_epochs")
        yield Problem(keys, "the run would never end; give max_steps or max_epochs")
    mask = at("loss_mask")
    if not any(s.loss_mask.model_dump().values()):
        yield Problem(mask, f"{mask.path} trains no role; set at least {mask.path}.assistant = true")
    ids, count = at("trainer_gpu_ids"), at("deployment.num_train_gpus")
    given = s.trainer_gpu_ids or []
    if len(set(given)) < len(given):
        yield Problem(ids, f"{ids}: a GPU is named twice")
    if given and s.deployment.num_train_gpus not in (None, len(given)):
        yield Problem((ids, count), f"{ids} are {len(given)}, not {count}")
    again = at("eval.retrigger_on_resume")
    if s.eval is not None and s.eval.retrigger_on_resume:
        rule = "is for `rl`: here a version that was evaluated is not published again; leave it out"
        yield Problem(again, f"{again} {rule}")
    kind = at("deployment.type")
    if s.deployment.type == "multi_node" and s.trainer_gpu_ids is not None:
        yield Problem((ids, kind), f"{ids.path} names what is on one machine; with {kind} leave it out")
    hosts, nodes = at("deployment.hosts"), at("deployment.num_train_nodes")
    if hosts.held is not None and len(hosts.held) != s.num_nodes:
        yield Problem((hosts, nodes), f"{hosts.path}: {len(hosts.held)} are given, and {nodes}; make them agree")


def pairs(s: SFTConfig, at: At) -> Problems:
    """[loss] belongs to pairs, rows to validate on are of the same kind, and what a reward model cannot do."""
    kind, loss, held_out = at("data.type"), at("loss"), at("val.data.type")
    is_pairs = s.data.type == "preference"
    if s.loss is not None and not is_pairs:
        rule = f'{loss.path} is for pairs, and {kind}; give data.type = "preference", or leave it out'
        yield Problem((loss, kind), rule)
    if s.val is not None and (s.val.data.type == "preference") != is_pairs:
        yield Problem((held_out, kind), f"{held_out} and {kind}: the loss of both must be the same; make them agree")
    if not is_pairs:
        return
    if s.model.indexer_kl_coeff is not None:
        index = at("model.indexer_kl_coeff")
        yield Problem((index, kind), f"{index} has no meaning for pairs; leave it out")
    smoothing, form = at("loss.label_smoothing"), at("loss.loss_type")
    if isinstance(s.loss, DpoSection) and s.loss.label_smoothing and s.loss.loss_type not in ("sigmoid", "robust"):
        rule = f'{smoothing} does nothing with {form}; use "sigmoid" or "robust", or leave it out'
        yield Problem((smoothing, form), rule)
    if not isinstance(s.loss, RewardSection):
        return
    named = at("loss.type")
    for key, is_wrong, why in (
        ("eval", s.eval is not None, "a reward model writes no text, so nothing can be played"),
        ("model.impl", s.model.impl == "hf", "a reward model is one that stretto computes itself"),
        (
            "ckpt.weights.save_adapter_separately",
            bool(value_of(s, "ckpt.weights.save_adapter_separately")),
            "the head beside the adapter is trained too, so the adapter alone is no reward model",
        ),
        ("model.vlm", s.model.vlm is not None, "a reward model reads text"),
    ):
        if is_wrong:
            yield Problem((at(key), named), f"{at(key).path} with {named}: {why}; leave it out")


def data_sets(s: SourceData, at: At) -> Problems:
    """Lists about data sets have one item per data set."""
    names = [s.name] if isinstance(s.name, str) else s.name
    shares = None if isinstance(s.probabilities, str) else s.probabilities
    lists: dict[str, Any] = {"subsets": s.subsets, "splits": s.splits, "probabilities": shares}
    given = {key: value for key, value in lists.items() if value is not None}
    count = len(names) if len(names) != 1 else max(map(len, given.values()), default=1)
    for key, value in given.items():
        if len(value) != count:
            what = f"{at(key).path} has {len(value)} items and there are {count} data sets; give one for each"
            yield Problem(at(key), what)
    share = at("probabilities")
    if shares and (min(shares) <= 0 or not 0.99 < sum(shares) < 1.01):
        yield Problem(share, f"{share} must be above 0, and 1 together")
    if not names:
        yield Problem(at("name"), f"{at('name').path} is empty; give a file or a data set")
    if s.probabilities is None:
        yield from idle(at, "stopping_strategy", "probabilities", "give them", why="every row comes once")


def evals_come(s: SFTConfig, at: At) -> Problems:
    """A run that evaluates lasts until its first eval."""
    interval, steps = at("eval.interval"), at("max_steps")
    if s.eval is not None and s.eval.interval and s.max_steps and s.eval.interval > s.max_steps:
        rule = f"{interval} is beyond {steps}, so nothing would be evaluated; lower it, or leave [eval] out"
        yield Problem((interval, steps), rule)


def sampled_for_nothing(r: SFTConfig, at: At) -> Problems:
    """`sft` samples nothing that could cost."""
    if r.budget is not None and r.budget.prices.sampled_tokens:
        price = at("budget.prices.sampled_tokens")
        yield Problem(price, f"{price} does nothing: `sft` samples no tokens; leave it out")


RULES: Rules = {SourceData: (data_sets,), SFTConfig: (evals_come, sampled_for_nothing, whole_run, pairs)}
