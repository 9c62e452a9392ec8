"""Frozen models beside the policy: who asks them by which name, what they cost, whom they teach."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stretto.config.root import EvalConfig, RLConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules
from stretto.config.sections.distill import ModelClientSection
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
                known = f"it has {', '.join(models)}" if models else f"add a table [models.{model}]"
                yield Problem(key, f"{key}: this run has no such model; {known}")


def priced(s: ModelClientSection, at: At) -> Problems:
    """A bound of costs needs a price."""
    bound = at("max_cost")
    if s.max_cost is not None and not (s.prompt_price or s.reply_price):
        prices = f"{at('prompt_price').path} and {at('reply_price').path}"
        yield Problem(bound, f"{bound}: without a price nothing costs anything; give {prices}, per million tokens")


RULES: Rules = {ModelClientSection: (priced,), RLConfig: (named_models,), EvalConfig: (named_models_of_eval,)}
