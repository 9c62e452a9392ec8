"""Rules of [inference]: what any engine has, its sizes and drafts. Rules of other engines are of their add-ons."""

from __future__ import annotations

from stretto.config.root import InferenceConfig
from stretto.config.rules.rule import At, Problem, Problems, Rules, idle
from stretto.config.section import show
from stretto.config.sections.engines import EngineGroups
from stretto.config.sections.inference import GROUP_KEYS, InferenceSection, misfit

MAX_LOOKUP = 16
"""Equal tokens for which the embedded engine can look."""


def served_model(s: InferenceConfig, at: At) -> Problems:
    """The verb `inference` serves a model."""
    key = at("model")
    if s.model is None:
        yield Problem(key, f"{key.path}: no model to serve; give its directory, `--model <directory>`")


def vllm_only(s: InferenceSection, at: At) -> Problems:
    """Keys that only vLLM has."""
    for name, value in s.vllm_only().items() if s.engine == "embedded" else ():
        key, rule = at(name), "the embedded engine does not support this; leave it out, or use vLLM"
        yield Problem((key, at("engine")), f"{key.path} = {show(value)}: {rule}")


def no_router(s: InferenceSection, at: At) -> Problems:
    """Only a router has a router's port."""
    if s.router is None:
        yield from idle(at, "deployment.router_port", "router", why="there is no router")


# -- drafts --


def drafts(s: InferenceSection, at: At) -> Problems:
    """How many equal tokens are looked for."""
    section = s.speculation
    if section is None:
        return
    low, high = at("speculation.prompt_lookup_min"), at("speculation.prompt_lookup_max")
    if section.method in ("ngram", "suffix") and (low.held or 0) > (high.held or low.held or 0):
        yield Problem((low, high), f"{low} is above {high}; lower it")
    for key in (low, high) if s.chosen_engine(has_gpu=False) == "embedded" else ():
        if (key.held or 0) > MAX_LOOKUP:
            yield Problem(key, f"{key}: the embedded engine looks for at most {MAX_LOOKUP} equal tokens; lower it")


def group_options(s: InferenceSection, at: At) -> Problems:
    """Groups of engines: there is an engine, and overrides may differ between groups."""
    shape = s.deployment
    if not isinstance(shape, EngineGroups):
        return
    if not shape.num_engines:
        key = at("deployment.groups")
        yield Problem(key, f"{key.path}: no group has engines; raise one's num_engines")
    for index, group in enumerate(shape.groups):
        for name, value in group.overrides.items():
            named = name.replace("-", "_")
            if named in GROUP_KEYS and (rule := misfit(named, value)):
                key = at(f"deployment.groups.{index}.overrides.{name}")
                yield Problem(key, f"{key}: {rule}")


# -- sizes --


def sizes(s: InferenceSection, at: At) -> Problems:
    """The sizes of each shape of engine."""
    shape = s.deployment
    if not isinstance(shape, EngineGroups) or not shape.groups:
        yield from engine_sizes(s, at)
        return
    found: list[Problem] = []
    for index, group in enumerate(shape.groups):
        name = lambda key, group=group, index=index: at.name(group.path(f"deployment.groups.{index}", key))
        own = s.of_group(group)
        found += engine_sizes(own, At(own, name))
    yield from dict.fromkeys(found)


def engine_sizes(s: InferenceSection, at: At) -> Problems:
    """What a cache and a step hold."""
    cache, block, length = at("kv_cache_tokens"), at("block_size"), at("max_model_len")
    size = s.block_size or 16
    if s.kv_cache_tokens and s.kv_cache_tokens < size:
        yield Problem((cache, block), f"{cache} is less than one block of {block.path} = {size}; raise it")
    if s.kv_cache_tokens and s.max_model_len and s.kv_cache_tokens < s.max_model_len:
        yield Problem((cache, length), f"{cache} cannot hold one sequence of {length}; raise it or lower {length.path}")
    step, sequences = at("max_num_batched_tokens"), at("max_num_seqs")
    if s.max_num_batched_tokens < s.max_num_seqs:
        yield Problem((step, sequences), f"{step} cannot hold one token of each of {sequences} sequences; raise it")
    moves, spread = at("enable_eplb"), at("enable_expert_parallel")
    if s.enable_eplb and s.enable_expert_parallel is not True and s.deployment.type != "disaggregated":
        yield Problem((moves, spread), f"{moves} moves experts between devices; set {spread.path} = true")


RULES: Rules = {
    InferenceConfig: (served_model,),
    InferenceSection: (vllm_only, no_router, drafts, group_options, sizes),
}
