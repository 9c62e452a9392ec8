"""Checks a root against the rules of all modules here, and of add-ons; roots know no rules."""

from __future__ import annotations

from collections.abc import Sequence

from stretto import addons
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.rules import batches, engine, frozen, learning, machines, megatron, model, run
from stretto.config.rules.rule import At, Problem, Problems, Rule, Rules, below, matching, of_part, walk
from stretto.config.section import Section
from stretto.config.sections.engines import RouterSection
from stretto.config.sections.orchestrator import OrchestratorKeys, OrchestratorSection
from stretto.config.sections.trainer import AdamWOptim, TrainerKeys, TrainerSection

GROUP = "stretto.rules"
TABLES = tuple(room.RULES for room in (run, model, learning, batches, engine, machines, megatron, frozen))
DOUBTS: tuple[tuple[type[Section], Rule], ...] = (
    (OrchestratorKeys, batches.late_rollouts),
    (OrchestratorKeys, batches.limit_never_reached),
    (RLConfig, run.budget_saves),
    (RLConfig, machines.changes_within_a_machine),
    (SFTConfig, run.budget_saves),
    (AdamWOptim, learning.high_rate),
    (RouterSection, engine.stand_in_router),
    (TrainerKeys, megatron.section_is_off),
)


def check(root: Section) -> list[Problem]:
    """The rules between keys that a root breaks."""
    tables = (*TABLES, *_of_add_ons(root))
    problems: list[Problem] = []
    for section, path in walk(root):
        if isinstance(section, RLConfig):
            problems += _broken(tables, TrainerSection, of_part(section.trainer_config(), "trainer"))
            problems += _broken(tables, OrchestratorSection, of_part(section.orchestrator_config(), "orchestrator"))
        for cls in reversed(type(section).__mro__):
            problems += _broken(tables, cls, below(section, path))
    return problems


def _of_add_ons(root: Section) -> list[Rules]:
    """The tables of add-ons whose section this root has, or has changed.

    Raises: ConfigError for a section whose add-on is not installed.
    """
    rules = addons.registered(GROUP)
    given = {
        rules[path]: path
        for path in rules
        for _, section, default in matching(root, path)
        if section not in (None, default)
    }
    return [_table(path) for path in given.values()]


def _table(name: str) -> Rules:
    found = getattr(addons.load(GROUP, name, f"[{name}]"), "RULES", None)
    if not isinstance(found, dict):
        raise addons.wrong(GROUP, name, "it has no RULES, a table of rules by class of section")
    return found


def _broken(tables: Sequence[Rules], cls: type, at: At) -> Problems:
    for table in tables:
        for rule in table.get(cls, ()):
            yield from rule(at.section, at)


def doubts(root: Section) -> list[Problem]:
    """Settings that work and that a user probably does not intend."""
    return [
        doubt
        for section, path in walk(root)
        for cls, rule in DOUBTS
        if isinstance(section, cls)
        for doubt in rule(section, below(section, path))
    ]
