"""Frozen models beside the policy: who asks them by which name, what they cost, whom they teach."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from stretto.config.root import EvalConfig, RLConfig
from stretto.config.rules.learning import algos_of
from stretto.config.rules.rule import At, Problem, Problems, Rules
from stretto.config.sections.distill import ModelClientSection, SftAlgo, TaughtAlgo
from stretto.config.sections.orchestrator import EnvSection


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
                yield Problem(key, f"{key}: this run has no such model; {_known(models, model)}")


def teaching_models(c: RLConfig, at: At) -> Problems:
    """Teachers that are frozen models of the run: they exist, count, and take what they score."""
    for path, algo in algos_of(c.orchestrator).items():
        teachers = algo.teachers if isinstance(algo, TaughtAlgo) else {}
        if isinstance(algo, SftAlgo) and len(teachers) > 1:
            key = at(f"orchestrator.{path}.teachers")
            yield Problem(key, f'{key.path}: one model plays; name one, or learn from several with type = "opd"')
        for name, weight in teachers.items():
            key = at(f"orchestrator.{path}.teachers.{name}")
            if name not in c.models:
                yield Problem(key, f"{key.path}: this run has no such model; {_known(c.models, name)}")
                continue
            if not 0 < weight < math.inf:
                yield Problem(key, f"{key} must be above 0; leave out a teacher that does not count")
            longest, length = at(f"models.{name}.max_model_len"), at("seq_len")
            if c.models[name].base_url is None and (c.models[name].max_model_len or c.seq_len + 1) <= c.seq_len:
                rule = f"{longest} must be above {length}: a scored sample takes one token more"
                yield Problem((longest, length), rule)


def _known(models: Collection[str], name: str) -> str:
    return f"it has {', '.join(models)}" if models else f"add a table [models.{name}]"


def priced(s: ModelClientSection, at: At) -> Problems:
    """A bound of costs needs a price."""
    bound = at("max_cost")
    if s.max_cost is not None and not (s.prompt_price or s.reply_price):
        prices = f"{at('prompt_price').path} and {at('reply_price').path}"
        yield Problem(bound, f"{bound}: without a price nothing costs anything; give {prices}, per million tokens")


RULES: Rules = {
    ModelClientSection: (priced,),
    RLConfig: (named_models, teaching_models),
    EvalConfig: (named_models_of_eval,),
}
