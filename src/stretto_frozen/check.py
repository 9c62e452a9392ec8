"""What is asked of the files of frozen models before a start: a teacher's tokens, and what scores replies."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.base.errors import ConfigError
from stretto.check.models import find_model, other_token
from stretto.config.root import EvalConfig, RLConfig
from stretto.config.sections.distill import TaughtAlgo
from stretto.config.sections.orchestrator import EnvSection
from stretto.data.hub_model import find_config
from stretto.data.model_file import is_classifier
from stretto.envs.rewards.builtin import scored_by


def check(cfg: RLConfig | EvalConfig) -> None:
    """Check the models whose files are here.

    Raises: ConfigError naming the key of a model that does not do what it is asked for.
    """
    if isinstance(cfg, EvalConfig):
        sections: dict[str, Sequence[EnvSection]] = {"eval.env": cfg.eval.env}
    else:
        _check_teachers(cfg)
        held_out = cfg.orchestrator.eval.env if cfg.orchestrator.eval is not None else ()
        sections = {"orchestrator.env": cfg.orchestrator.env, "orchestrator.eval.env": held_out}
    for path, envs in sections.items():
        for index, env in enumerate(envs):
            _check_scores(cfg, f"{path}.{index}", env)


def _check_teachers(cfg: RLConfig) -> None:
    """Check that the teachers whose engines the run starts have the policy's tokens.

    Raises: ConfigError naming the teacher and a token that differs.
    """
    policy = None if cfg.model.scratch is not None else find_model(cfg.model.name)
    if policy is None:
        return
    section = cfg.orchestrator
    algos = [section.algo, *(env.algo for env in section.env)]
    names = {name for algo in algos if isinstance(algo, TaughtAlgo) for name in algo.teachers}
    models = {f"models.{name}.model": cfg.models[name].model for name in sorted(names & cfg.models.keys())}
    if cfg.teacher_inference is not None:
        models["teacher_inference.model"] = cfg.teacher_inference.model
    for key, name in models.items():
        teacher = find_model(name) if name is not None else None
        if teacher is not None and (difference := other_token(policy.directory, teacher.directory)):
            raise ConfigError(
                f"{key} = {name!r} has another tokenizer than {cfg.model.name!r}, which is trained: {difference}; a "
                "teacher scores the policy's tokens, so give one with the same tokenizer"
            )


def _check_scores(cfg: RLConfig | EvalConfig, place: str, env: EnvSection) -> None:
    """Raises: ConfigError for a model that writes text where an environment has it score replies."""
    rewards = env.args.get("rewards")
    given = [env.args.get("reward"), *(rewards if isinstance(rewards, dict) else ())]
    for name in filter(None, (scored_by(each) for each in given if isinstance(each, str))):
        section = cfg.models.get(name)
        model = None if section is None or section.base_url is not None else getattr(section, "model", None)
        if model is not None and find_config(model) is not None and not is_classifier(model):
            raise ConfigError(
                f"[models.{name}] model = {model!r} writes text, and {place} has it score replies (reward "
                f'= "models.{name}"); give a reward model (`sft` with [loss] type = "reward" makes one), or a '
                "function that asks this one as a judge"
            )
