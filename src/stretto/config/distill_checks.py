"""Rules of distillation: a teacher where one is asked, and nothing beside it that would do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stretto.config.distill import WITHOUT_REWARD, OpdAlgo, OpsdAlgo, SftAlgo
from stretto.config.shared import Problem

if TYPE_CHECKING:
    from stretto.config.algorithm import Algo
    from stretto.config.inference import InferenceSection
    from stretto.config.orchestrator import OrchestratorSection
    from stretto.config.roots import RLConfig

LOCAL_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::")


def check_distillation(section: OrchestratorSection, prefix: str) -> list[Problem]:
    """Teachers, demonstrations, and gates and filters of advantages that these algos do not have."""

    def path(key: str) -> str:
        return f"{prefix}.{key}" if prefix else key

    places: dict[str, Algo] = {path(f"env.{i}.algo"): e.algo for i, e in enumerate(section.env) if e.algo}
    if len(places) < len(section.env) or not section.env:
        places[path("algo")] = section.algo
    problems = check_teacher(section, places, path("teacher"))
    for place, algo in places.items():
        problems += _check_algo(algo, place, has_launcher=bool(prefix))
    for index, env in enumerate(section.env):
        algo = env.algo or section.algo
        for name, gate in env.curriculum.gates.items():
            if gate.type == "advantage_range" and algo.type in WITHOUT_REWARD:
                is_covered = gate.reject_min <= 0 <= gate.reject_max
                what = "every group would be rejected" if is_covered else "it would never reject"
                paths = (path(f"env.{index}.curriculum.gates.{name}.type"), path("algo.type"))
                rule = f'{algo.type} has no advantages, they are all 0: {what}; drop it or use "reward_range"'
                problems.append(Problem(paths[:1], f'{paths[0]} = "advantage_range": {rule}'))
    kinds = {algo.type for algo in places.values()}
    for index, each in enumerate(section.filters):
        if each.type == "zero_advantage" and kinds and kinds <= set(WITHOUT_REWARD):
            where = path(f"filters.{index}.type")
            rule = f"does nothing: {' and '.join(sorted(kinds))} have no advantages; drop the filter"
            problems.append(Problem((where,), f'{where} = "zero_advantage" {rule}'))
    if section.mask_offpolicy_in_partial_rollout and not section.partial_rollout:
        paths = (path("mask_offpolicy_in_partial_rollout"), path("partial_rollout"))
        rule = f"does nothing: with {paths[1]} = false no rollout is continued; drop one of the two"
        problems.append(Problem(paths, f"{paths[0]} = true {rule}"))
    return problems


def _check_algo(algo: Algo, place: str, *, has_launcher: bool) -> list[Problem]:
    problems = []
    if isinstance(algo, OpsdAlgo) and algo.template.count("{demonstration}") != 1:
        where = f"{place}.template"
        problems.append(Problem((where,), f"{where} must hold {{demonstration}} once: that is what it shows"))
    if isinstance(algo, OpdAlgo | SftAlgo) and algo.teacher is not None and algo.teacher.base_url is None:
        where = f"{place}.teacher.base_url"
        way = "[orchestrator.teacher] is the one that `rl` starts" if has_launcher else "start it first"
        problems.append(Problem((where,), f"{where}: give the address of a teacher that runs; {way}"))
    if algo.type == "echo" and algo.tool is None and algo.user is None and algo.system is None:
        rule = "no role has a weight, so that it would be grpo; give tool, user or system one"
        problems.append(Problem((place,), f'{place}: type = "echo": {rule}'))
    return problems


def check_teacher(section: OrchestratorSection, places: dict[str, Algo], path: str) -> list[Problem]:
    """A teacher where one is asked, and only there."""
    taught = {place: algo for place, algo in places.items() if isinstance(algo, OpdAlgo | SftAlgo)}
    asked = [place for place, algo in taught.items() if algo.teacher is None]
    if asked and section.teacher is None:
        rule = f"needs [{path}] with the base_url of an engine that serves the teacher"
        kind = places[asked[0]].type
        return [Problem((f"{asked[0]}.type",), f'{asked[0]}.type = "{kind}" {rule}')]
    if section.teacher is not None and not asked:
        rule = 'does nothing: no algo has type = "opd" or "sft" without a teacher of its own; drop it'
        return [Problem((path,), f"{path} {rule}")]
    is_alone = not path.startswith("orchestrator.")
    if section.teacher is not None and section.teacher.base_url is None and is_alone:
        rule = "give the address of the engine that serves it; only `rl` starts one"
        return [Problem((f"{path}.base_url",), f"{path}.base_url: {rule}")]
    return []


def check_teacher_engine(cfg: RLConfig) -> list[Problem]:
    """[teacher_inference] against [orchestrator.teacher]: one of them says where the teacher is."""
    teacher, engine = cfg.orchestrator.teacher, cfg.teacher_inference
    if engine is None:
        if teacher is not None and teacher.base_url is None:
            rule = "give base_url of an engine that runs, or model, the directory that one is started with"
            return [Problem(("orchestrator.teacher",), f"orchestrator.teacher: {rule}")]
        return _unused_gpus(cfg)
    assert teacher is not None, "filled in with teacher_inference"
    problems = []
    name = engine.served_model_name or engine.model
    if teacher.model not in (None, name):
        paths = ("orchestrator.teacher.model", "teacher_inference.model")
        rule = f'is not what teacher_inference serves, "{name}"; give one of the two'
        problems.append(Problem(paths, f'{paths[0]} = "{teacher.model}" {rule}'))
    if teacher.base_url is not None and not _is_served(teacher.base_url, engine):
        paths = ("orchestrator.teacher.base_url", "teacher_inference.server.port")
        rule = "is not the engine that teacher_inference starts; give one of the two"
        problems.append(Problem(paths, f"{paths[0]} = {teacher.base_url} {rule}"))
    if engine.deployment.type != "single_node" or engine.deployment.num_replicas != 1:
        path = "teacher_inference.deployment"
        rule = "`rl` starts one engine for the teacher; start more by hand and give their base_url"
        problems.append(Problem((path,), f"{path}: {rule}"))
    if engine.max_model_len is not None and engine.max_model_len <= cfg.orchestrator.seq_len:
        paths = ("teacher_inference.max_model_len", "orchestrator.seq_len")
        rule = f"must be above {paths[1]} = {cfg.orchestrator.seq_len}: a scored sample takes one token more"
        problems.append(Problem(paths, f"{paths[0]} = {engine.max_model_len} {rule}"))
    return problems


def _is_served(base_url: list[str] | str, engine: InferenceSection) -> bool:
    urls = [base_url] if isinstance(base_url, str) else base_url
    hosts = (*LOCAL_HOSTS, engine.server.host)
    parts = [urlsplit(url) for url in urls]
    return len(urls) == 1 and parts[0].hostname in hosts and parts[0].port == engine.server.port


def _unused_gpus(cfg: RLConfig) -> list[Problem]:
    if cfg.teacher_gpu_ids is None:
        return []
    rule = "does nothing: this run starts no teacher; drop it"
    return [Problem(("teacher_gpu_ids",), f"teacher_gpu_ids {rule}")]


def check_loss_is_used(cfg: RLConfig) -> list[Problem]:
    """[trainer.loss] where no environment has an rl component: everything in it would do nothing."""
    section = cfg.orchestrator
    kinds = {(env.algo or section.algo).type for env in section.env}
    if not kinds or not kinds <= set(WITHOUT_REWARD):
        return []
    loss = cfg.trainer.loss
    fields = type(loss).model_fields
    given = [key for key in loss.model_fields_set if getattr(loss, key) != fields[key].default]
    if loss.type != "default":
        given = ["type"]
    what = " and ".join(sorted(kinds))
    rule = f"does nothing: {what} have a loss of their own, and no environment has another algo; drop it"
    return [Problem((f"trainer.loss.{key}",), f"trainer.loss.{key} {rule}") for key in sorted(given)]
