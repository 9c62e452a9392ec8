"""Makes the first tasks of a run's environments, in a dry run and before a run starts other processes.

It renders the prompt of the first task as the policy will get it; a dry run also plays one rollout of it with a reply
that means nothing. check/code.py imports the functions and reads the files that a config names.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from stretto.base import ports
from stretto.base.errors import ConfigError, DataError, EnvError, boundary
from stretto.base.foreign import blocked_text, warn_when_blocked, without_tracebacks
from stretto.chat.placeholders import with_placeholders
from stretto.chat.render import Renderer
from stretto.chat.scratch import common_phrases
from stretto.config.root import EvalConfig, OrchestratorConfig
from stretto.config.sections.orchestrator import EnvSection, SamplingOverrides
from stretto.data.hub_model import find_config
from stretto.data.model_file import read_model_file
from stretto.data.values import describe_value
from stretto.envs.base import (
    Environment,
    Message,
    NeedsTokenizer,
    RunInfo,
    SingleTurnEnv,
    Split,
    needs_worker,
    prompt_of,
    tasks_of,
)
from stretto.envs.checks import look_into
from stretto.envs.dataset import Dataset
from stretto.envs.multi_turn import MultiTurnEnv
from stretto.orchestrator.build import build_eval_renderer, build_policy_renderer, open_env, run_info, untrained_tokens
from stretto.orchestrator.first_rollout import fault_of, play, same_name_note, same_task, without_engines
from stretto.orchestrator.lengths import Limit, cut_reply, limits_of, room_after
from stretto.orchestrator.rollout.play import bias_by_token, with_system_prompt
from stretto.records.rollout import Task
from stretto.transports.meeting import WIRES, at_all_addresses, moved_ports

logger = logging.getLogger(__name__)

PLAY_TIMEOUT_S, MODELS_TIMEOUT_S = 10.0, 2.0
"""A rollout of a dry run may take this long; the shorter time is for runs with models that a dry run does not start."""
SPLITS = {"train": "to train on", "eval": "to evaluate on"}

DRAWN_PROMPT = (
    "differs when it is made twice: a resumed run and a retry play another prompt under the same task; draw from "
    "random.Random(task.task_id)"
)

Prompt = str | list[Message] | None
"""Messages; the text itself if no chat template is applied; None if it is made while the task is played."""


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
    with without_tracebacks():
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
        try:
            env = open_env(section, Path(), stack, looking.info)
        except NeedsTokenizer:
            if cfg.client.api == "chat" or renderer is not None:
                raise
            about = f"environment {name}: it needs the tokenizer of the policy, which is not here"
            return FirstTask(about, is_made=False)
        first = await _first_task(env, renderer, looking.split, section.system_prompt)
        where = f"environment {name}"
        notes = list(first.notes)
        if first.num_tokens is not None:
            room_after(first.num_tokens, looking.limits, where)
            notes.append(cut_reply(first.num_tokens, _reply_tokens(cfg, section), looking.limits))
        if renderer is None or _plays_itself(cfg):
            return replace(first, notes=tuple(filter(None, notes)))
        blocked: dict[str, float] = {}

        def note_blocked(place: str, blocked_s: float) -> None:
            blocked[place] = blocked_s
            if blocked_s >= PLAY_TIMEOUT_S / 2:
                text = "note: %s: %s has not returned for %.0f s; the dry run waits for it, Ctrl-C ends it"
                logger.warning(text, where, place, blocked_s)

        with warn_when_blocked(tell=note_blocked):
            unplayed, note = await _play_first(section, env, looking, where)
        notes += [unplayed, note]
        notes += [f"{where}: {blocked_text(*each)}" for each in blocked.items()]
        return replace(first, notes=tuple(filter(None, notes)), is_played=not unplayed)


def _in_worker(section: EnvSection) -> FirstTask:
    """What is known of an environment that runs in worker processes, without starting them."""
    name = section.name or section.id
    where = f"environment {name}"
    tasks, missing = look_into(section.id, section.args, name)
    notes = tuple(f"NOT READY: {where}: {text}" for text in missing)
    about = f"{where}: {tasks}runs in worker processes, which a dry run does not start"
    return FirstTask(about, is_made=False, notes=notes)


async def _check_held_out(section: EnvSection, looking: _Looking) -> None:
    """Build the environment of an eval, and make and render its first held-out task."""
    if section.num_workers or needs_worker(section.id):
        return
    async with AsyncExitStack() as stack:
        try:
            env = open_env(section, Path(), stack, looking.info)
        except NeedsTokenizer:
            if looking.cfg.client.api == "chat" or looking.renderer is not None:
                raise
            return  # said where the first task is looked for
        await _first_task(env, looking.renderer, looking.split, section.system_prompt)


def _plays_itself(cfg: OrchestratorConfig | EvalConfig) -> bool:
    """Whether the rollouts are made by a function of the user, and not by environments."""
    if isinstance(cfg, EvalConfig):
        return cfg.client.api == "chat"
    return cfg.hooks.rollout_function is not None


async def _play_first(section: EnvSection, env: Environment, looking: _Looking, where: str) -> tuple[str, str]:
    """Play one rollout: why it was not played to its end, "" if it was; and what to know of its turns.

    Raises: EnvError for a fault of the environment.
    """
    assert looking.renderer is not None
    task = tasks_of(env, looking.split).task(0)
    timeout_s = MODELS_TIMEOUT_S if looking.info.model_urls else PLAY_TIMEOUT_S
    played = await play(looking.cfg, section, env, task, looking.renderer, timeout_s)
    has_turns = any(rollout.num_turns > 1 for rollout in played.group.rollouts)
    note = looking.renderer.branching if has_turns and looking.split == "train" else ""
    return fault_of(where, played), note and f"{where}: {note}"


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
    label = task.data.get("label")
    labelled = "" if label is None else f" with the label {describe_value(label)}"
    about = f"environment {env.name}: tasks {count}; the first is {task.task_id}{labelled}"
    where = f"environment {env.name}, task {task.task_id}, prompt"
    notes = same_name_note(env, source, task)
    prompt, tools = await first_prompt(env, task, where)
    if isinstance(prompt, list):
        prompt = with_system_prompt(prompt, system_prompt)
    if prompt is None:
        return FirstTask(f"{about}, whose prompt is made while it is played", notes=notes)
    if renderer is None:
        return FirstTask(f"{about}, not rendered:", _plain(prompt), notes=notes)
    again, _ = await first_prompt(env, task, where)
    is_same = repr(again if isinstance(again, str) else with_system_prompt(again or [], system_prompt)) == repr(prompt)
    notes += () if is_same else (f"{where} {DRAWN_PROMPT}",)
    notes += () if prompt and any(each != "" for each in _contents(prompt)) else (f"{where} is empty",)
    with boundary(EnvError, where):
        try:
            ids = renderer.encode(prompt) if isinstance(prompt, str) else renderer.render_prompt(prompt, tools)
        except DataError as cause:  # what the renderer would drop; it knows no environment
            raise EnvError(f"{where}: {cause}") from cause
    return FirstTask(f"{about}, {len(ids)} tokens:", renderer.readable(ids), num_tokens=len(ids), notes=notes)


async def first_prompt(env: Environment, task: Task, where: str) -> tuple[Prompt, list[dict[str, Any]] | None]:
    """The first prompt of a task, and the tools that it describes."""
    if isinstance(env, Dataset):
        return task.data["prompt"], task.data["tools"]
    if not isinstance(env, SingleTurnEnv | MultiTurnEnv):  # a `prompt` of another class may be anything
        return None, None
    messages = await prompt_of(env, task, where)
    return messages, env.tool_schemas() if hasattr(env, "tool_schemas") else None


def _contents(prompt: str | list[Message]) -> list[Any]:
    return [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]


def _plain(prompt: str | list[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content')}" for message in with_placeholders(prompt))


def shorter_by_phrases(texts: Sequence[str], num_tokens: int) -> str:
    """The phrases that would halve a row of this many tokens, as lines of a configuration; "" if none do."""
    phrases = common_phrases(texts) if len(texts) > 1 else []
    left = num_tokens - sum((len(phrase) - 1) * texts[0].count(phrase) for phrase in phrases)
    if left > num_tokens / 2:
        return ""
    lines = "".join(f"  {json.dumps(phrase, ensure_ascii=False)},\n" for phrase in phrases)
    return f"\n\nin [model.scratch] this would make the row about {left} tokens long:\nphrases = [\n{lines}]"


def listens(cfg: OrchestratorConfig) -> str:
    """Where an orchestrator that is started alone would listen."""
    claims = ports.PortClaims()
    now = at_all_addresses(cfg, claims)
    claims.close()
    lines = [f"orchestrator  control port {now.control.port}", *(f"note: {line}" for line in moved_ports(cfg, now))]
    for key in () if cfg.debug == "rollouts" else WIRES:
        wire: Any = getattr(now, key)
        try:
            if hasattr(wire, "port") and not ports.is_free(wire.host, wire.port):
                taken = ports.taken_text(f"{key}.port", wire.port)
                lines.append(f"NOT READY: {taken}; stop that process, or give another port")
        except ConfigError as error:  # a host of another machine
            lines.append(f"NOT READY: {key}.host: {error}")
    return "\n".join(lines)
