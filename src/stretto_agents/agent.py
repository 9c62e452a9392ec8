"""The environment `agent`: a program that plays the records of `dataset`, with the policy as its model.

    [[orchestrator.env]]
    id = "agent"
    args = { command = ["claude", "-p", "{prompt}"], path = "train.jsonl", reward = "math" }

The program gets an address and a key of its rollout, in the variables that clients of OpenAI and Anthropic read and as
`{base_url}` and `{key}` of its command. What the policy samples for it is trained (gateway/session.py).
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, EnvError
from stretto.base.files import write_atomic
from stretto.base.process import describe_exit
from stretto.data.pictures import image_parts
from stretto.envs.base import EpisodeLimits, RolloutContext, RolloutResult, RunInfo
from stretto.envs.dataset import Dataset, build_arguments, turn_rewards_of
from stretto.envs.dataset_records import DatasetSettings, Records
from stretto.records.rollout import Task
from stretto.vime.sample import Status
from stretto_agents.program import MAX_PRINTED_BYTES, Cut, Ended, filled, run_program, variables
from stretto_agents.server import Gateway
from stretto_agents.session import Session

ANSWERS = ("reply", "output")
PLACEHOLDERS = ("prompt", "base_url", "key")
MOST_REFUSED = 3
"""Requests beyond a limit, after which a program that goes on asking is ended."""
_UNUSED = ("generate", "sample_hooks", "group_reward", "data_source")
"""Settings of `dataset` that are about replies which the environment itself requests."""


def agent(
    command: list[str],
    path: str | list[str] | None = None,
    *,
    answer: str = "reply",
    max_turns: int | None = None,
    max_tokens: int | None = None,
    timeout_s: float | None = 600.0,
    cwd: str | None = None,
    output_dir: str | None = None,
    pass_env: list[str] | None = None,
    run: RunInfo | None = None,
    **args: Any,
) -> Agent:
    """Build the environment. Further arguments are those of `dataset`.

    command: the program and its arguments, with `{prompt}`, `{base_url}` and `{key}`. answer: what the reward
    judges: `reply`, the last reply of the policy, or `output`, what the program printed. max_turns, max_tokens: of one
    rollout; a request beyond them is refused. timeout_s: then the program is ended, and the rollout is rewarded as it
    is. cwd: the directory in which it runs; None: an empty one for each rollout. output_dir: a file for each rollout
    with the end of what its program printed. pass_env: names of environment variables that the program gets although
    they look like secrets.

    Raises: ConfigError for arguments that do not fit; DataError for records that do not fit, with file and line.
    """
    if not isinstance(command, list) or not command or not all(isinstance(word, str) and word for word in command):
        example = '["claude", "-p", "{prompt}"]'
        raise ConfigError(f"agent: command = {command!r} must be a list of texts, such as {example}")
    if answer not in ANSWERS:
        raise ConfigError(f'agent: answer = {answer!r} must be "reply" or "output"')
    for name, value in {"max_turns": max_turns, "max_tokens": max_tokens, "timeout_s": timeout_s}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ConfigError(f"agent: {name} = {value!r} must be a number > 0, or left out")
    if cwd is not None and not Path(cwd).is_dir():
        raise ConfigError(f"agent: cwd = {cwd!r} is no directory")
    if not isinstance(pass_env or [], list) or not all(isinstance(name, str) for name in pass_env or ()):
        raise ConfigError(f'agent: pass_env = {pass_env!r} must be a list of names, such as ["GITHUB_TOKEN"]')
    settings, run = DatasetSettings(path, **args), run or RunInfo()
    settings.check()
    if used := [name for name in _UNUSED if getattr(settings, name)]:
        raise ConfigError(f"agent: {used[0]} does nothing here: the program requests the replies; remove it")
    if not settings.apply_chat_template:
        raise ConfigError("agent: apply_chat_template = false does nothing here: programs send messages; remove it")
    _check_placeholders(command)
    built = Agent(settings, Records(settings, run, build_arguments(settings, run)), _found(command))
    built.answer, built.timeout_s = answer, timeout_s
    built.limits = EpisodeLimits(max_turns, max_tokens, timeout_s)
    built.cwd = None if cwd is None else Path(cwd).resolve()
    built.pass_env = pass_env or []
    built.output_dir = None if output_dir is None else Path(output_dir).resolve()
    return built


# `load_environment` reads the signature: it refuses arguments that are not there, and fills in `run`.
_OWN = [each for each in inspect.signature(agent).parameters.values() if each.kind is not each.VAR_KEYWORD]
_DATA = [
    each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for name, each in inspect.signature(DatasetSettings).parameters.items()
    if name not in ("path", *_UNUSED)
]
agent.__signature__ = inspect.Signature([*_OWN, *_DATA])  # type: ignore[attr-defined]  # `inspect` reads it


def _check_placeholders(command: list[str]) -> None:
    """Raises: ConfigError for a word in braces that is almost one which is replaced."""
    import difflib

    for word in re.findall(r"\{(\w+)\}", " ".join(command)):
        near = difflib.get_close_matches(word, PLACEHOLDERS, n=1, cutoff=0.75)
        if word not in PLACEHOLDERS and near:
            raise ConfigError(f"agent: command: {{{word}}} is not replaced; did you mean {{{near[0]}}}?")


def _found(command: list[str]) -> list[str]:
    """The command with files of this directory by their whole paths: the program runs in another one.

    Raises: ConfigError if the program is not found.
    """
    program = shutil.which(command[0])
    if program is None and "{" not in command[0]:
        raise ConfigError(f"agent: command[0] = {command[0]!r} is no program that can be started; give its path")
    rest = [str(Path(word).resolve()) if os.path.isfile(word) else word for word in command]
    return [str(Path(program).absolute()) if program else command[0], *rest[1:]]


class Agent(Dataset):
    """Each rollout is one run of the program."""

    answer: str
    timeout_s: float | None
    limits: EpisodeLimits
    cwd: Path | None
    output_dir: Path | None
    pass_env: list[str]

    def __init__(self, settings: DatasetSettings, records: Records, command: list[str]) -> None:
        super().__init__(settings, records)
        self.name = "agent"
        self.command = command
        self._gateway = Gateway()

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        values = {"prompt": prompt_text(task)}
        async with self._gateway.open(ctx) as access:
            session = access.session
            values |= {"base_url": access.base_url, "key": access.key}
            argv = filled(self.command, values)
            ended = await run_program(
                f"agent {task.task_id}",
                argv,
                env=variables(access.env, self.pass_env),
                timeout_s=self.timeout_s,
                cwd=self.cwd,
                is_over=lambda: session.num_refused > MOST_REFUSED,
            )
        self._keep(ended, task, ctx)
        self._check(ended, session)
        sample = self._sample(task, ctx.episode)
        sample.response = session.last_text if self.answer == "reply" else ended.output.strip()
        sample.metadata = {**sample.metadata, "output": ended.output, "replies": session.replies}
        is_truncated = session.is_limited or isinstance(ended.end, Cut)
        sample.status = Status.TRUNCATED if is_truncated else Status.COMPLETED
        metrics = {
            "turns": float(len(session.answers)),
            "conversations": float(session.num_conversations),
            "repeated_requests": float(session.num_repeated),
        }
        return RolloutResult(
            reward=await self._reward_of(sample),
            metrics=metrics,
            is_truncated=is_truncated,
            is_timeout=ended.end is Cut.TIME,
            turn_rewards=turn_rewards_of([sample]),  # the reward function may have written some
        )

    async def close(self) -> None:
        await self._gateway.close()

    def _keep(self, ended: Ended, task: Task, ctx: RolloutContext) -> None:
        if self.output_dir is not None:
            rollout_id = ctx.episode.rollout_id if ctx.episode is not None else uuid.uuid4().hex
            path = self.output_dir / task.task_id / f"{rollout_id}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, ended.output.encode())

    def _check(self, ended: Ended, session: Session) -> None:
        """Raises: the first error of a turn; EnvError if the program died, printed too much, or got no reply."""
        if session.error is not None:
            raise session.error
        program = Path(self.command[0]).name
        if ended.end is Cut.OUTPUT:
            size = MAX_PRINTED_BYTES >> 20
            raise EnvError(f"agent: {program} printed more than {size} MiB; its last lines:\n{ended.last_lines}")
        if not session.answers and session.limit is not None:
            raise session.limit
        if isinstance(ended.end, int) and ended.end and not session.is_limited:
            how = describe_exit(ended.end)
            raise EnvError(f"agent: {program} ended with {how}; its last lines:\n{ended.last_lines}")
        if not session.answers:
            how = f"was ended after {self.timeout_s:g} s" if ended.end is Cut.TIME else "ended"
            raise EnvError(
                f"agent: {program} {how} without one reply; it must send its requests to OPENAI_BASE_URL or "
                f"ANTHROPIC_BASE_URL, which it is given, or take {{base_url}} and {{key}}. Its last lines:\n"
                f"{ended.last_lines}"
            )


def prompt_text(task: Task) -> str:
    """The prompt of a record as text for a command: its messages, with empty lines between them.

    Raises: EnvError if it has pictures.
    """
    messages = task.data["prompt"]
    if any(image_parts(messages)):
        raise EnvError(f"agent: task {task.task_id}: a command cannot hold the pictures of its prompt")
    texts = []
    for message in messages:
        content = message.get("content") or ""
        texts.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
    return "\n\n".join(texts)
