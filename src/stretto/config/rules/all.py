"""Checks a root against the rules of all modules here, and of add-ons; roots know no rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType

from stretto import addons
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.rules import batches, engine, learning, machines, model, run
from stretto.config.rules.rule import At, Problem, Problems, Rule, Rules, below, of_part, walk
from stretto.config.section import Section
from stretto.config.sections.orchestrator import OrchestratorKeys, OrchestratorSection
from stretto.config.sections.trainer import AdamWOptim, TrainerSection

GROUP = "stretto.rules"
TABLES = tuple(room.RULES for room in (run, model, learning, batches, engine, machines))
DOUBTS: tuple[tuple[type[Section], Rule], ...] = (
    (OrchestratorKeys, batches.late_rollouts),
    (OrchestratorKeys, batches.limit_never_reached),
    (RLConfig, run.budget_saves),
    (RLConfig, machines.changes_within_a_machine),
    (SFTConfig, run.budget_saves),
    (AdamWOptim, learning.high_rate),
)


def check(root: Section) -> list[Problem]:
    """The rules between keys that a root breaks."""
    walked = [*walk(root)]
    tables = [*TABLES, *(module.RULES for module in _of_add_ons(walked))]
    problems: list[Problem] = []
    for section, path in walked:
        if isinstance(section, RLConfig):
            problems += _broken(tables, TrainerSection, of_part(section.trainer_config(), "trainer"))
            problems += _broken(tables, OrchestratorSection, of_part(section.orchestrator_config(), "orchestrator"))
        for cls in reversed(type(section).__mro__):
            problems += _broken(tables, cls, below(section, path))
    return problems


def _of_add_ons(walked: Iterable[tuple[Section, str]]) -> list[ModuleType]:
    """The modules of add-ons for the classes of these sections."""
    classes = {cls.__name__ for section, _ in walked for cls in type(section).__mro__}
    found = {
        addons.registered(GROUP)[name]: _module(name) for name in addons.offers(GROUP) if _class_of(name) in classes
    }
    return list(found.values())


def _class_of(name: str) -> str:
    """The class of section that an entry point is about; what comes after a dot tells it from another package's."""
    return name.partition(".")[0]


@cache
def _module(name: str) -> ModuleType:
    found: ModuleType = addons.load(GROUP, name, f"a {name}")
    if not isinstance(getattr(found, "RULES", None), dict):
        raise addons.wrong(GROUP, name, "it has no RULES, a table of rules by class of section")
    return found


def _broken(tables: Sequence[Rules], cls: type, at: At) -> Problems:
    for table in tables:
        for rule in table.get(cls, ()):
            yield from rule(at.section, at)


def doubts(root: Section) -> list[Problem]:
    """Settings that work and that a user probably does not intend."""
    walked = [*walk(root)]
    rules = [*DOUBTS, *(doubt for module in _of_add_ons(walked) for doubt in getattr(module, "DOUBTS", ()))]
    return [
        doubt
        for section, path in walked
        for cls, rule in rules
        if isinstance(section, cls)
        for doubt in rule(section, below(section, path))
    ]
