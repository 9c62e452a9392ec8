"""Checks the user's code and files, in a dry run and before a run starts other processes.

Imports functions, reads first records, makes the first task of each environment and renders its prompt as the policy
will get it. A dry run also plays one rollout of it with a reply that means nothing. Only what the config names is
imported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from stretto.base.errors import ConfigError, DataError, EnvError, boundary
from stretto.base.foreign import blocked_text, load_function, load_object, warn_when_blocked, without_tracebacks
from stretto.chat.placeholders import with_placeholders
from stretto.chat.render import Renderer
from stretto.config.model_file import read_model_file
from stretto.config.root import EvalConfig, OrchestratorConfig, SFTConfig
from stretto.config.sections.hooks import ENVIRONMENTS
from stretto.config.sections.orchestrator import EnvSection, OrchestratorKeys, SamplingOverrides
from stretto.config.sections.sft import FileData
from stretto.config.sections.trainer import TrainerHooksSection
from stretto.data.hub_model import find_config
from stretto.data.records import read_records
from stretto.envs.base import Environment, Message, RunInfo, SingleTurnEnv, Split, needs_worker, prompt_of, tasks_of
from stretto.envs.dataset import Dataset
from stretto.envs.find import missing_plugins
from stretto.envs.multi_turn import MultiTurnEnv
from stretto.orchestrator.build import build_eval_renderer, build_policy_renderer, open_env, run_info, untrained_tokens
from stretto.orchestrator.first_rollout import fault_of, play, same_task, without_engines
from stretto.orchestrator.lengths import Limit, cut_reply, limits_of, room_after
from stretto.orchestrator.rollout.play import bias_by_token, with_system_prompt
from stretto.records.rollout import Task
from stretto.vime.saved import load as load_saved

NUM_ARGUMENTS = {
    "dynamic_sampling_filter": 2,
    "buffer_filter": 4,
    "sample_filter": 2,
    "reward_post_process": 2,
    "convert_samples_to_train_data": 2,
    "all_samples_process": 3,
    "rollout_log": 5,
    "eval_log": 4,
    "rollout_function": 3,
    "eval_function": 3,
}
"""Number of arguments of each function in [orchestrator.hooks]."""
PLAY_TIMEOUT_S, MODELS_TIMEOUT_S = 10.0, 2.0
"""A rollout of a dry run may take this long; the shorter time is for runs with models that a dry run does not start."""
SPLITS = {"train": "to train on", "eval": "to evaluate on"}

DRAWN_PROMPT = (
    "differs when it is made twice: a resumed run and a retry play another prompt under the same task; draw from "
    "random.Random(task.task_id)"
)

Checked = tuple[str, str]
"""What was done (`imported` or `read`), and the name of the function or file."""
Prompt = str | list[Message] | None
"""Messages; the text itself if no chat template is applied; None if it is made while the task is played."""


def check_user_code(cfg: OrchestratorKeys) -> list[Checked]:
    """Import the functions and read a record of each file that the section names.

    Raises: ConfigError or DataError for a path without an object, and for a file that cannot be read.
    """
    return list(_check_user_code(cfg))


def _check_user_code(cfg: OrchestratorKeys) -> Iterator[Checked]:
    for key, count in NUM_ARGUMENTS.items():
        if (path := getattr(cfg.hooks, key)) is not None and path != ENVIRONMENTS:
            yield _check_hook(path, f"orchestrator.hooks.{key}", count)
    if (pattern := cfg.hooks.args.get("load_debug_rollout_data")) is not None:
        load_saved(pattern, 0)  # the first of the saved rollouts that are trained on
        yield "read", str(pattern)
    held_out = cfg.eval.env if cfg.eval is not None else ()
    named: list[tuple[str, EnvSection]]
    named = [(f"orchestrator.env.{index}", env) for index, env in enumerate(cfg.env)]
    named += [(f"orchestrator.eval.env.{index}", env) for index, env in enumerate(held_out)]
    for place, env in named:
        yield from _check_environment(place, env)
        yield from _check_algo(getattr(env, "algo", None), f"{place}.algo.import_path")
    yield from _check_algo(cfg.algo, "orchestrator.algo.import_path")


def check_plugins(cfg: OrchestratorKeys) -> None:
    """Check that the packages of verifiers' environments are installed, before anything is started.

    Raises: ConfigError that names the environment, the key and the package.
    """
    for env in (*cfg.env, *(cfg.eval.env if cfg.eval is not None else ())):
        for text in missing_plugins(env.id, env.args):
            raise ConfigError(f"environment {env.name or env.id}: {text}")


def _check_algo(algo: Any, setting: str) -> Iterator[Checked]:
    if getattr(algo, "import_path", None) is not None:
        load_function(algo.import_path, algo.kwargs, setting)
        yield "imported", algo.import_path


@dataclass(frozen=True)
class FirstTask:
    """The first task of an environment."""

    about: str
    prompt: str = ""
    """As the policy will get it, with the chat template; its messages without a tokenizer; "" if not known."""
    is_made: bool = True
    """Whether the environment was built, and not only named."""
    num_tokens: int | None = None
    """Length of the rendered prompt."""
    notes: tuple[str, ...] = ()
    """What is not as the config says: replies that are cut, a rollout that was not played to its end."""
    is_played: bool = False
    """Whether a rollout was played and scored."""


class Preview(NamedTuple):
    """The first tasks of a config's environments, and how they are rendered."""

    tasks: list[FirstTask]
    missing: str
    """Why prompts are not rendered; "" if they are."""
    renderer: str = ""
    """By what they are rendered."""


def preview(cfg: OrchestratorConfig | EvalConfig, limits: Sequence[Limit] | None = None) -> Preview:
    """The first task of every environment, and what one rollout of it with a dummy reply shows.

    For `eval` it is the first held-out task. limits: the longest sequence by several keys; None takes those of `cfg`.

    Raises: ConfigError, DataError, EnvError that name the wrong name, argument, task, prompt or score.
    """
    envs: Sequence[EnvSection]
    split: Split
    if isinstance(cfg, EvalConfig):
        envs, sampling, split, model = cfg.eval.env, cfg.eval.sampling, "eval", cfg.model
    else:
        envs, sampling, split, model = cfg.env, cfg.train.sampling, "train", cfg.model.name
    renderer, missing = None, ""
    try:
        if cfg.client.api == "chat":
            raise ConfigError('with client.api = "chat" the server renders them')
        renderer = build_eval_renderer(cfg) if isinstance(cfg, EvalConfig) else build_policy_renderer(cfg)
    except (ConfigError, DataError) as error:  # the model may be the result of a run that has not run yet
        missing = str(error)
    if renderer is not None:
        check_sampling(cfg, renderer)
    info = without_engines(run_info(cfg, renderer, sampling, cfg.tokenizer.name or model))
    looking = _Looking(cfg, renderer, info, split, limits_of(cfg) if limits is None else limits)
    tasks = [asyncio.run(_preview(section, looking)) for section in envs]
    if isinstance(cfg, OrchestratorConfig) and cfg.eval is not None:
        for section in cfg.eval.env:
            asyncio.run(_check_held_out(section, replace(looking, split="eval")))
            if (alone := _in_worker(section)).notes:
                tasks.append(alone)
    if renderer is None:
        return Preview(tasks, missing)
    is_scratch = isinstance(cfg, OrchestratorConfig) and cfg.model.scratch is not None
    note = "" if is_scratch or model is None else untrained_tokens(renderer, model)
    return Preview(tasks, missing, "; ".join(filter(None, [renderer.description, note])))


def check_sampling(cfg: OrchestratorConfig | EvalConfig, renderer: Renderer) -> None:
    """Check the tokens and texts of every `sampling` against the model's vocabulary and tokenizer.

    Raises: ConfigError for a token that the model does not have, and for a text with too few or too many tokens.
    """
    places: list[tuple[str, SamplingOverrides]] = []
    if isinstance(cfg, OrchestratorConfig):
        places.append(("orchestrator.train.sampling", cfg.train.sampling))
        places += [(f"orchestrator.env.{index}.sampling", env.sampling) for index, env in enumerate(cfg.env)]
    if cfg.eval is not None:
        at = "orchestrator.eval" if isinstance(cfg, OrchestratorConfig) else "eval"
        places.append((f"{at}.sampling", cfg.eval.sampling))
        places += [(f"{at}.env.{index}.sampling", env.sampling) for index, env in enumerate(cfg.eval.env)]
    vocab_size = _vocab_size(cfg) or renderer.tokenizer.vocab_size
    for place, sampling in places:
        for token in sampling.stop_token_ids or ():
            if token >= vocab_size:
                raise ConfigError(
                    f"{place}.stop_token_ids has {token}, and the model's tokens are 0 to {vocab_size - 1}; correct it"
                )
        for word in sampling.bad_words or ():
            if not len(renderer.encode(word.lstrip())):
                raise ConfigError(f"{place}.bad_words has {word!r}, which has no token; remove it")
        try:
            biases = bias_by_token(sampling.logit_bias or {}, renderer)
        except EnvError as error:
            raise ConfigError(f"{place}.{error}") from None
        if wrong := next((token for token in biases if token >= vocab_size), None):
            raise ConfigError(
                f"{place}.logit_bias has token {wrong}, and the model's tokens are 0 to {vocab_size - 1}; correct it"
            )


def _vocab_size(cfg: OrchestratorConfig | EvalConfig) -> int | None:
    """The size of the model's vocabulary as its config.json says it; None if there is none."""
    model = cfg.model if isinstance(cfg, EvalConfig) else cfg.model.name
    if not isinstance(cfg, EvalConfig) and cfg.model.scratch is not None:
        return None
    if not isinstance(model, str) or (directory := find_config(model)) is None:
        return None
    found = read_model_file(directory)
    return found.get("vocab_size") or (found.get("text_config") or {}).get("vocab_size")


@dataclass(frozen=True)
class _Looking:
    """What the preview of every environment needs."""

    cfg: OrchestratorConfig | EvalConfig
    renderer: Renderer | None
    info: RunInfo
    split: Split
    limits: Sequence[Limit]


async def _preview(section: EnvSection, looking: _Looking) -> FirstTask:
    name = section.name or section.id
    if section.num_workers or needs_worker(section.id):
        return _in_worker(section)
    cfg, renderer = looking.cfg, looking.renderer
    async with AsyncExitStack() as stack:
        env = open_env(section, Path(), stack, looking.info)
        first = await _first_task(env, renderer, looking.split, section.system_prompt)
        where = f"environment {name}"
        notes = list(first.notes)
        if first.num_tokens is not None:
            room_after(first.num_tokens, looking.limits, where)
            notes.append(cut_reply(first.num_tokens, _reply_tokens(cfg, section), looking.limits))
        if renderer is None or _plays_itself(cfg):
            return replace(first, notes=tuple(filter(None, notes)))
        blocked: dict[str, float] = {}
        with warn_when_blocked(tell=blocked.__setitem__):
            notes.append(unplayed := await _play_first(section, env, looking, where))
        notes += [f"{where}: {blocked_text(*each)}" for each in blocked.items()]
        return replace(first, notes=tuple(filter(None, notes)), is_played=not unplayed)


def _in_worker(section: EnvSection) -> FirstTask:
    """What is known of an environment that runs in worker processes, without starting them."""
    where = f"environment {section.name or section.id}"
    notes = tuple(f"NOT READY: {where}: {text}" for text in missing_plugins(section.id, section.args))
    about = f"{where}: runs in worker processes, which a dry run does not start"
    return FirstTask(about, is_made=False, notes=notes)


async def _check_held_out(section: EnvSection, looking: _Looking) -> None:
    """Build the environment of an eval, and make and render its first held-out task."""
    if section.num_workers or needs_worker(section.id):
        return
    async with AsyncExitStack() as stack:
        env = open_env(section, Path(), stack, looking.info)
        await _first_task(env, looking.renderer, looking.split, section.system_prompt)


def _plays_itself(cfg: OrchestratorConfig | EvalConfig) -> bool:
    """Whether the rollouts are made by a function of the user, and not by environments."""
    if isinstance(cfg, EvalConfig):
        return cfg.client.api == "chat"
    return cfg.hooks.rollout_function is not None


async def _play_first(section: EnvSection, env: Environment, looking: _Looking, where: str) -> str:
    """Play one rollout; why it was not played to its end, "" if it was.

    Raises: EnvError for a fault of the environment.
    """
    assert looking.renderer is not None
    task = tasks_of(env, looking.split).task(0)
    timeout_s = MODELS_TIMEOUT_S if looking.info.model_urls else PLAY_TIMEOUT_S
    with without_tracebacks():
        group = await play(looking.cfg, section, env, task, looking.renderer, timeout_s)
    return fault_of(where, group)


def _reply_tokens(cfg: OrchestratorConfig | EvalConfig, section: EnvSection) -> int | None:
    """The most tokens of a reply in an environment."""
    own = getattr(section, "sampling", None)
    everywhere = cfg.eval.sampling if isinstance(cfg, EvalConfig) else cfg.train.sampling
    return getattr(own, "max_completion_tokens", None) or everywhere.max_completion_tokens


async def check_first_tasks(train: Sequence[Environment], held_out: Sequence[Environment], renderer: Renderer) -> None:
    """Make and render the first task of each environment, as a dry run does.

    Raises: ConfigError, EnvError that name the environment, the task, and file and line of what raised.
    """
    splits: dict[Split, Sequence[Environment]] = {"train": train, "eval": held_out}
    for split, envs in splits.items():
        for env in envs:
            await _first_task(env, renderer, split)


async def _first_task(
    env: Environment, renderer: Renderer | None, split: Split, system_prompt: str | None = None
) -> FirstTask:
    source = tasks_of(env, split)
    task = same_task(env, source, split)
    count = "without end" if source.num_tasks is None else f"{source.num_tasks} {SPLITS[split]}"
    about = f"environment {env.name}: tasks {count}; the first is {task.task_id}"
    where = f"environment {env.name}, task {task.task_id}, prompt"
    prompt, tools = await first_prompt(env, task, where)
    if isinstance(prompt, list):
        prompt = with_system_prompt(prompt, system_prompt)
    if prompt is None:
        return FirstTask(f"{about}, whose prompt is made while it is played")
    if renderer is None:
        return FirstTask(f"{about}, not rendered:", _plain(prompt))
    again, _ = await first_prompt(env, task, where)
    is_same = repr(again if isinstance(again, str) else with_system_prompt(again or [], system_prompt)) == repr(prompt)
    notes = () if is_same else (f"{where} {DRAWN_PROMPT}",)
    with boundary(EnvError, where):
        ids = renderer.encode(prompt) if isinstance(prompt, str) else renderer.render_prompt(prompt, tools)
    return FirstTask(f"{about}, {len(ids)} tokens:", renderer.readable(ids), num_tokens=len(ids), notes=notes)


async def first_prompt(env: Environment, task: Task, where: str) -> tuple[Prompt, list[dict[str, Any]] | None]:
    """The first prompt of a task, and the tools that it describes."""
    if isinstance(env, Dataset):
        return task.data["prompt"], task.data["tools"]
    if not isinstance(env, SingleTurnEnv | MultiTurnEnv):  # a `prompt` of another class may be anything
        return None, None
    messages = await prompt_of(env, task, where)
    return messages, env.tool_schemas() if hasattr(env, "tool_schemas") else None


def _plain(prompt: str | list[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content')}" for message in with_placeholders(prompt))


def check_sft_records(cfg: SFTConfig) -> list[Checked]:
    """Read the first record of each file that `sft` trains or validates on; returns the files' names.

    Raises: ConfigError or DataError for a file that cannot be read.
    """
    checked = []
    for setting, section in (("data.name", cfg), ("val.data.name", cfg.val)):
        if section is not None and isinstance(data := section.data, FileData):
            for source in data.sources:
                next(read_records(source, setting, is_streamed=data.streaming, convert=data.convert))
                checked.append(("read", source))
    return checked


def check_trainer_hooks(hooks: TrainerHooksSection) -> list[Checked]:
    """Import the functions of [trainer.hooks].

    Raises: ConfigError for one that does not exist, or takes other arguments.
    """
    from stretto.vime.calls import TRAINER_HOOKS, load_trainer_hooks

    named = {key: path for key in TRAINER_HOOKS if (path := getattr(hooks, key)) is not None}
    load_trainer_hooks(named)
    return [("imported", path) for path in named.values()]


def _check_hook(path: str, setting: str, num_arguments: int) -> Checked:
    from stretto.vime.calls import Hook

    Hook.load(path, setting, num_arguments)
    return "imported", path


def _check_environment(place: str, env: EnvSection) -> Iterator[Checked]:
    """Import an environment's class, or read the files and import the functions of a dataset."""
    if env.id == "dataset":
        yield from _check_dataset(env.args)
    elif ":" in env.id:
        load_object(env.id, f"{place}.id")
        yield "imported", env.id


def _check_dataset(args: dict[str, Any]) -> Iterator[Checked]:
    for key in ("path", "eval_path"):
        sources, convert = args.get(key) or [], args.get("convert")
        for source in [sources] if isinstance(sources, str) else sources:
            records = read_records(
                source,
                f"dataset: {key}",
                is_streamed=args.get("streaming") is True,
                convert=convert if isinstance(convert, str) else None,
            )
            next(records)
            yield "read", source
    for key, count in (("data_source", 1), ("reward", 2), ("generate", 3)):
        path = args.get(key)
        if isinstance(path, str) and (":" in path or "." in path):
            yield _check_hook(path, f"dataset: {key}", count)
