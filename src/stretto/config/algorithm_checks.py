"""Rules of [trainer.loss] and [orchestrator.algo]: settings that would do nothing are refused with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.config.algorithm import Algo, CorrectionSection, CreditSection, LossSection
from stretto.config.shared import Problem

if TYPE_CHECKING:
    from stretto.config.orchestrator import OrchestratorSection

COMPARES = {"grpo", "dr_grpo", "rloo", "max_rl", "reinforce_plus_plus_baseline"}
"""Rules whose baseline is the group."""
WITHOUT_RATIO = {"reinforce", "custom"}
"""Losses that importance weights may multiply."""


def check_loss(loss: LossSection, path: str) -> list[Problem]:
    """Settings of the loss that would do nothing, or lack their partner."""
    problems = []
    if loss.reduction == "constant" and loss.reduction_tokens is None:
        message = f'{path}.reduction = "constant" needs {path}.reduction_tokens, such as the longest reply'
        problems.append(Problem((f"{path}.reduction",), message))
    if loss.reduction != "constant" and loss.reduction_tokens is not None:
        paths = (f"{path}.reduction_tokens", f"{path}.reduction")
        rule = f'does nothing with {paths[1]} = "{loss.reduction}"; drop it or use "constant"'
        problems.append(Problem(paths, f"{paths[0]} = {loss.reduction_tokens} {rule}"))
    if getattr(loss, "adv_tau", 1.0) == getattr(loss, "kl_tau", 1.0) == 0:
        paths = (f"{path}.adv_tau", f"{path}.kl_tau")
        problems.append(
            Problem(paths, f"{paths[0]} = {paths[1]} = 0 leave no loss; give one of them a value")
        )
    if (kl := loss.reference_kl) is not None and kl.estimator == "k1" and not kl.is_unbiased:
        paths = (f"{path}.reference_kl.estimator", f"{path}.reference_kl.is_unbiased")
        rule = "the gradient of k1 is zero on average; use k3, or is_unbiased = true"
        problems.append(Problem(paths, f'{paths[0]} = "k1": {rule}'))
    if loss.correction is not None:
        problems += check_correction(loss, loss.correction, f"{path}.correction")
    return problems


def check_correction(loss: LossSection, correction: CorrectionSection, path: str) -> list[Problem]:
    """A correction that acts, and acts once."""
    if not any(correction.model_dump().values()):
        rule = "does nothing by itself; give weights, reject or veto, or drop it"
        return [Problem((path,), f"{path}: the section {rule}")]
    problems = []
    if correction.weights is not None and loss.type not in WITHOUT_RATIO:
        paths = (f"{path}.weights", path.replace(".correction", ".type"))
        rule = "already contains the ratio of trainer to sampler, which would act twice"
        way = 'use type = "reinforce" with weights, or reject and veto with this one'
        problems.append(Problem(paths, f'{paths[0]}: type = "{loss.type}" {rule}; {way}'))
    for key in ("weights", "reject"):
        section = getattr(correction, key)
        if section is not None and section.low >= section.high:
            paths = (f"{path}.{key}.low", f"{path}.{key}.high")
            rule = f"must be below {paths[1]} = {section.high:g}; lower it"
            problems.append(Problem(paths, f"{paths[0]} = {section.low:g} {rule}"))
    return problems


def check_algos(section: OrchestratorSection, prefix: str) -> list[Problem]:
    """Every rule of credit that is used: something to compare, and shaping that can act."""

    def path(key: str) -> str:
        return f"{prefix}.{key}" if prefix else key

    algos = {path(f"env.{i}.algo"): env.algo for i, env in enumerate(section.env) if env.algo is not None}
    if len(algos) < len(section.env) or not section.env:
        algos[path("algo")] = section.algo
    elif section.algo != type(section).model_fields["algo"].default:
        rule = "does nothing: every environment has an `algo` of its own; drop it or one of those"
        return [Problem((path("algo"),), f"{path('algo')} {rule}")]
    problems = []
    group, temperature = path("group_size"), path("train.sampling.temperature")
    if section.group_size == 1 and any(algo.type in COMPARES for algo in algos.values()):
        kind = next(algo.type for algo in algos.values() if algo.type in COMPARES)
        rule = f"every advantage would be zero, for {kind} subtracts the group's mean and one is its own mean"
        problems.append(Problem((group,), f"{group} = 1: {rule}; use 2 or more (8 is the default)"))
    if section.train.sampling.temperature == 0 and any(a.type != "zero" for a in algos.values()):
        rule = "the rollouts of a group would be equal and teach nothing; use more, such as 1.0"
        problems.append(Problem((temperature,), f"{temperature} = 0 is greedy: {rule}"))
    problems += check_teacher(
        section, [place for place, algo in algos.items() if algo.type == "opd"], path("teacher")
    )
    filters = [i for i, each in enumerate(section.filters) if each.type == "zero_advantage"]
    roles = [place for place, algo in algos.items() if algo.type == "rae"]
    if filters and roles:
        paths = (path(f"filters.{filters[0]}.type"), f"{roles[0]}.type")
        rule = "flags rewards of 0, for the baselines of rae are known only when the batch is made; drop the filter"
        problems.append(Problem(paths, f'{paths[0]} = "zero_advantage" with {paths[1]} = "rae" {rule}'))
    for place, algo in algos.items():
        problems += check_shaping(algo, place, section.seq_len)
    return problems


def check_teacher(section: OrchestratorSection, taught: list[str], path: str) -> list[Problem]:
    """A teacher where one is asked, and only there."""
    if taught and section.teacher is None:
        rule = f"needs [{path}] with the base_url of an engine that serves the teacher"
        return [Problem((f"{taught[0]}.type",), f'{taught[0]}.type = "opd" {rule}')]
    if section.teacher is not None and not taught:
        rule = 'does nothing: no algo has type = "opd"; drop it or give an algo that type'
        return [Problem((path,), f"{path} {rule}")]
    return []


def check_shaping(algo: Algo, path: str, seq_len: int) -> list[Problem]:
    """Penalties that some rollout can incur."""
    if not isinstance(algo, CreditSection):
        return []
    problems = []
    if (section := algo.length_penalty) is not None and not any(section.model_dump().values()):
        rule = "all its weights are 0, so it does nothing; drop it or give one a value"
        problems.append(Problem((f"{path}.length_penalty",), f"{path}.length_penalty: {rule}"))
    if algo.overlong is not None:
        limit, buffer = algo.overlong.max_tokens, algo.overlong.buffer_tokens
        paths = (f"{path}.overlong.buffer_tokens", f"{path}.overlong.max_tokens")
        if buffer > limit:
            rule = f"is longer than {paths[1]} = {limit}: even an empty reply would pay; lower it"
            problems.append(Problem(paths, f"{paths[0]} = {buffer} {rule}"))
        elif limit - buffer >= seq_len:
            rule = f"the penalty would begin at {limit - buffer} tokens, which no rollout has with seq_len = "
            problems.append(Problem(paths[1:], f"{paths[1]} = {limit}: {rule}{seq_len}; lower it"))
    return problems
