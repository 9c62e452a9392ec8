"""Rules of [orchestrator.steering]."""

from __future__ import annotations

from stretto.config.root import OrchestratorConfig, RLConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules
from stretto.config.sections.orchestrator import OrchestratorKeys, OrchestratorSection


def levels(s: OrchestratorKeys, at: At) -> Problems:
    """Levels that are steered have room between their bounds."""
    if (section := s.steering) is None:
        return
    low, high, start = at("steering.min_level"), at("steering.max_level"), at("max_async_level")
    if section.min_level > section.max_level:
        yield Problem((low, high), f"{low} is above {high}; lower it")
    oldest = at("max_off_policy_steps")
    if section.max_level > s.max_off_policy_steps:
        rule = f"{high} is above {oldest}, which drops rollouts that are so old; lower it, or raise the other"
        yield Problem((high, oldest), rule)
    if s.max_async_level and not section.min_level <= s.max_async_level <= section.max_level:
        rule = f"{start} is where steering starts, and not between {low} and {high}; give one between them"
        yield Problem((start, low, high), rule)
    factor = at("oversampling_factor")
    if s.oversampling_factor is not None:
        yield Problem(
            (factor, at("steering")), f"{factor} fixes the rollouts in flight that steering sets; leave it out"
        )


def update_interval(s: OrchestratorSection, at: At) -> Problems:
    """The most steps between two versions are no fewer than the fewest, and the level can rise with them."""
    most, every, high = at("steering.max_update_interval"), at("weight_broadcast.interval"), at("steering.max_level")
    if (section := s.steering) is None or section.max_update_interval is None:
        return
    more = section.max_update_interval - s.weight_broadcast.interval
    if more < 0:
        yield Problem((most, every), f"{most} is below {every}, where it starts; raise it, or lower the other")
    elif more > max(section.max_level - section.min_level, 0):
        rule = f"{most} needs {high.path} = {section.min_level + more} or more, because the level rises with it"
        yield Problem((most, high), f"{rule}; lower it, or raise the other")


def clock(c: RLConfig | OrchestratorConfig, at: At) -> Problems:
    """What is steered by measured times is not the same in every run."""
    s, path = (c.orchestrator, "orchestrator.") if isinstance(c, RLConfig) else (c, "")
    if s.steering is None:
        return
    key = at(f"{path}steering")
    if c.deterministic:
        switch = at("deterministic")
        yield Problem(
            (key, switch), f"{key.path} follows measured times, and {switch} allows none; leave one of them out"
        )
    if c.colocate is not None:
        turns = at("colocate")
        rule = f"{key.path} does nothing with {turns.path}, whose steps are synchronous; leave one of them out"
        yield Problem((key, turns), rule)
    elif not s.max_async_level:
        start = at(f"{path}max_async_level")
        yield Problem((key, start), f"{start} is synchronous, and {key.path} starts there; give 1 or more")


RULES: Rules = {
    RLConfig: (clock,),
    OrchestratorConfig: (clock,),
    OrchestratorKeys: (levels,),
    OrchestratorSection: (update_interval,),
}
