"""Rules of frozen models: who asks them by which name, where they are served, what they cost, whom they teach."""

from __future__ import annotations

import math
import re

from stretto.config.root import OrchestratorConfig, RLConfig
from stretto.config.rules.rule import At, Named, Problem, Problems, Rules, idle, is_address, is_served, known_models
from stretto.config.sections.algorithm import Algo
from stretto.config.sections.distill import ModelClientSection, OpsdAlgo, ScoredAlgo, SftAlgo, TaughtAlgo
from stretto.config.sections.orchestrator import OrchestratorSection

POLICY_NAMES = ("actor", "default")
"""Names of the policy in vime's terms."""


def teaching_models(c: RLConfig, at: At) -> Problems:
    """Teachers that are frozen models of the run: they exist, count, and take what they score."""
    for path, algo in c.orchestrator.algos.items():
        teachers = algo.teachers if isinstance(algo, TaughtAlgo) else {}
        if isinstance(algo, SftAlgo) and len(teachers) > 1:
            key = at(f"orchestrator.{path}.teachers")
            yield Problem(key, f'{key.path}: one model plays; name one, or learn from several with type = "opd"')
        for name, weight in teachers.items():
            key = at(f"orchestrator.{path}.teachers.{name}")
            if name not in c.models:
                yield Problem(key, f"{key.path}: this run has no such model; {known_models(c.models, name)}")
                continue
            if not 0 < weight < math.inf:
                yield Problem(key, f"{key} must be above 0; leave out a teacher that does not count")
            longest, length = at(f"models.{name}.max_model_len"), at("seq_len")
            if c.models[name].base_url is None and (c.models[name].max_model_len or c.seq_len + 1) <= c.seq_len:
                rule = f"{longest} must be above {length}: a scored sample takes one token more"
                yield Problem((longest, length), rule)


def teacher(c: RLConfig, at: At) -> Problems:
    """[teacher_inference] and [orchestrator.teacher] agree about the teacher's model and address."""
    teacher, engine, key = c.orchestrator.teacher, c.teacher_inference, at("orchestrator.teacher")
    longest, length = at("teacher_inference.max_model_len"), at("seq_len")
    if engine is not None and engine.max_model_len and engine.max_model_len <= c.seq_len:
        rule = f"{longest} must be above {length}: a scored sample takes one token more"
        yield Problem((longest, length), rule)
    if teacher is not None and teacher.base_url is not None:
        yield from _addresses(teacher.base_url, at(f"{key.path}.base_url"))
    if engine is None or teacher is None:
        if teacher is not None and teacher.base_url is None:
            way = "give base_url of an engine that runs, or model, the directory that one is started with"
            yield Problem(key, f"{key.path}: {way}")
        return
    name, model, url = engine.served_model_name or engine.model, at(f"{key.path}.model"), at(f"{key.path}.base_url")
    if teacher.model not in (None, name):
        rule = f'is not what teacher_inference serves, "{name}"; give one of the two'
        yield Problem((model, at("teacher_inference.model")), f"{model} {rule}")
    if teacher.base_url is not None and not is_served(teacher.base_url, engine, is_only=True):
        rule = f"{url.path} = {teacher.base_url} is not the engine that teacher_inference starts; give one of the two"
        yield Problem((url, at("teacher_inference.server.port")), rule)
    if engine.deployment.type != "single_node" or engine.deployment.num_replicas != 1:
        shape = at("teacher_inference.deployment")
        rule = "`rl` starts one engine for the teacher; start more by hand and give their base_url"
        yield Problem(shape, f"{shape.path}: {rule}")


def frozen_models(c: RLConfig, at: At) -> Problems:
    """Frozen models have a name, something to serve, and machines with room for it."""
    for name, section in c.models.items():
        key = at(f"models.{name}")
        if name in POLICY_NAMES:
            yield Problem(key, f"{key.path}: a model's name is the policy's name; use another, such as judge")
        elif not re.fullmatch(r"[A-Za-z][\w-]*", name):
            rule = "must be letters, digits, _ and -; use another, such as judge"
            yield Problem(key, f"{key.path}: a model's name {rule}")
        if section.api_key is not None:
            secret = at(f"models.{name}.api_key")
            yield Problem(secret, f"{secret.path}: functions send it no key; leave it out")
        if section.base_url is not None:
            yield from _addresses(section.base_url, at(f"models.{name}.base_url"))
            continue
        if section.client.api_key_var is not None:
            named = at(f"models.{name}.client.api_key_var")
            yield Problem(named, f"{named}: engines that the run starts get a key of their own; leave it out")
        if section.model is None:
            yield Problem(key, f"{key.path}: give model, the directory to serve, or base_url of engines that run")
        yield from _nodes_of_model(c, name, at)


def _addresses(given: list[str] | str, key: Named) -> Problems:
    """The addresses of engines that are not the policy's are some."""
    for url in [given] if isinstance(given, str) else given:
        if not is_address(url):
            what = f'{key.path} = "{url}" is not an address; write it like http://127.0.0.1:8000/v1'
            yield Problem(key, what)
            return


def _nodes_of_model(c: RLConfig, name: str, at: At) -> Problems:
    """A frozen model has no more nodes, and no more GPUs of a node, than the run has for it."""
    shape, section, key, ids = c.deployment, c.models[name], at(f"models.{name}"), at(f"models.{name}.gpu_ids")
    own = section.deployment
    if shape.type != "multi_node":
        if own.num_nodes > 1:
            nodes, way = at(f"{key.path}.deployment"), 'use deployment.type = "multi_node", or give base_url'
            yield Problem(nodes, f"{nodes.path} takes several nodes, and this run has one; {way}")
        return
    if section.gpu_ids is not None:
        yield Problem(ids, f"{ids}: over several nodes it gets the first that are free; leave it out")
    gpus = section.gpus_with_idle if own.num_nodes == 1 else getattr(own, "gpus_per_node", 0)
    if shape.gpus_per_node and section.device != "cpu" and gpus > shape.gpus_of_models:
        taken = f"{gpus} GPUs of each node" if own.num_nodes > 1 else f"{gpus} GPUs"
        way = "lower its engines or degrees, raise deployment.model_gpus_per_node, spread it over nodes with "
        way += f"{key.path}.deployment.type, or start it by hand and give base_url"
        yield Problem(key, f"{key.path} takes {taken}, and a node of models has {shape.gpus_of_models}; {way}")


# -- teachers --


def divergence(s: ScoredAlgo, at: At) -> Problems:
    """Which divergence to a teacher counts with several tokens."""
    if s.top_k is None:
        yield from idle(at, "divergence", "top_k", "give a number of tokens")


def demonstration(s: OpsdAlgo, at: At) -> Problems:
    """A template shows its demonstration."""
    key = at("template")
    if s.template.count("{demonstration}") != 1:
        yield Problem(key, f"{key.path} must hold {{demonstration}} once: that is what it shows")


def uses_run_teacher(algo: Algo) -> bool:
    """Whether it learns from [orchestrator.teacher]."""
    return isinstance(algo, TaughtAlgo) and algo.teacher is None and not algo.teachers


def teachers(s: OrchestratorSection, at: At) -> Problems:
    """There is a teacher if, and only if, an algo needs one."""
    taught = {path: algo for path, algo in s.algos.items() if isinstance(algo, TaughtAlgo)}
    users = [path for path, algo in taught.items() if uses_run_teacher(algo)]
    teacher = at("teacher")
    if users and s.teacher is None:
        kind = at(f"{users[0]}.type")
        yield Problem(kind, f"{kind} needs [{teacher.path}] with the base_url of an engine that serves the teacher")
    elif s.teacher is not None and not users:
        what = 'does nothing: no algo has type = "opd" or "sft" without a teacher of its own; drop it'
        yield Problem(teacher, f"{teacher.path} {what}")
    for path, algo in taught.items():
        if algo.teacher is not None and algo.teachers:
            both = at(f"{path}.teacher"), at(f"{path}.teachers")
            yield Problem(both, f"{both[0].path} and {both[1].path} say both who teaches; give one")
        elif algo.teacher is not None and algo.teacher.base_url is None:
            key = at(f"{path}.teacher.base_url")
            what = f"give the address of a teacher that runs; `rl` starts [{teacher.path}] and the models of `teachers`"
            yield Problem(key, f"{key.path}: {what}")


def teacher_address(s: OrchestratorConfig, at: At) -> Problems:
    """The verb `orchestrator` starts no teacher."""
    key = at("teacher.base_url")
    if s.teacher and s.teacher.base_url is None and any(map(uses_run_teacher, s.algos.values())):
        yield Problem(key, f"{key.path}: give the address of the engine that serves it; only `rl` starts one")


# -- costs --


def priced(s: ModelClientSection, at: At) -> Problems:
    """A bound of costs needs a price."""
    bound = at("max_cost")
    if s.max_cost is not None and not (s.prompt_price or s.reply_price):
        prices = f"{at('prompt_price').path} and {at('reply_price').path}"
        yield Problem(bound, f"{bound}: without a price nothing costs anything; give {prices}, per million tokens")


RULES: Rules = {
    ModelClientSection: (priced,),
    ScoredAlgo: (divergence,),
    OpsdAlgo: (demonstration,),
    OrchestratorConfig: (teacher_address,),
    OrchestratorSection: (teachers,),
    RLConfig: (teacher, frozen_models, teaching_models),
}
