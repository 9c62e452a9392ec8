"""Checks a root against the rules of all modules here; roots know no rules."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.config.root import RLConfig
from stretto.config.rules import batches, engine, learning, machines, model, ray, run, service, slurm
from stretto.config.rules.rule import At, Problem, Rule, Rules, below, of_part, walk
from stretto.config.section import Section
from stretto.config.sections.engines import RouterSection
from stretto.config.sections.orchestrator import OrchestratorKeys, OrchestratorSection
from stretto.config.sections.trainer import AdamWOptim, TrainerSection

ROOMS = (run, model, learning, batches, engine, machines, slurm, ray, service)
TABLES: tuple[Rules, ...] = tuple(room.RULES for room in ROOMS)
DOUBTS: tuple[tuple[type[Section], Rule], ...] = (
    (OrchestratorKeys, batches.SHORT_ROLLOUTS),
    (OrchestratorKeys, batches.NEVER_REACHED),
    (AdamWOptim, learning.HIGH_RATE),
    (RouterSection, engine.STAND_IN),
)


def check(root: Section) -> list[Problem]:
    """The rules between keys that a root breaks."""
    problems: list[Problem] = []
    for section, path in walk(root):
        if isinstance(section, RLConfig):
            problems += _broken(TrainerSection, section.trainer_config(), of_part("trainer"))
            problems += _broken(OrchestratorSection, section.orchestrator_config(), of_part("orchestrator"))
        for cls in reversed(type(section).__mro__):
            problems += _broken(cls, section, below(path))
    return problems


def _broken(cls: type, section: Section, at: At) -> Iterator[Problem]:
    for table in TABLES:
        for rule in table.get(cls, ()):
            yield from rule(section, at)


def doubts(root: Section) -> list[Problem]:
    """Settings that work and that a user probably does not intend."""
    return [
        doubt
        for section, path in walk(root)
        for cls, rule in DOUBTS
        if isinstance(section, cls)
        for doubt in rule(section, below(path))
    ]
