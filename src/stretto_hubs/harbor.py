"""`harbor:SUITE`: tasks of Harbor, each rollout a trial with one of Harbor's agents whose model is the policy.

SUITE is a directory of tasks, or a dataset that Harbor knows, such as `terminal-bench@2.0`. Harbor itself plays the
trial: it makes the environment, runs the agent and the tests. It may have a Python of its own, in which each worker
keeps one process for all its trials (other_python/play_trials.py). The agent's requests go to the gateway: it finds the
address and the key of the rollout in its environment variables. The reward is the verifier's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from stretto.base import process
from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import EpisodeLimits, RolloutContext, RolloutResult, Split, TaskSource
from stretto.records.rollout import Task
from stretto_agents.server import Access, Gateway
from stretto_hubs.servers import env_for, find_python, missing_package, split_of

PROGRAM = Path(__file__).parent / "other_python" / "play_trials.py"
LOCAL = "local_environment:LocalEnvironment"
_MAX_LINE_BYTES = 2**26
_GRACE_S = 10.0
_LOOK_S = 300.0
_TIMEOUTS = ("AgentTimeoutError",)


class Harbor:
    """A suite of Harbor.

    tasks: names of tasks, with `*`; None: all. agent: the name of one of Harbor's agents, or `module:Class`.
    agent_args: its settings. environment: where tasks are played: `"docker"` and the other names of Harbor,
    `module:Class`, or `"local"`, without containers. environment_args: its settings. model: the model's name as the
    agent wants it, with its provider. reward: which of the verifier's rewards counts, if there are several. num_eval:
    how many of the last tasks are held out (0: training and evaluation use all). max_turns, max_tokens: of one
    rollout. timeout_multiplier: of all time limits of the tasks. gateway_host: the address of this machine as the agent
    sees it. python: the Python that has Harbor; None: this one. output_dir: keeps the directories of trials, with logs
    and trajectories.
    """

    def __init__(
        self,
        source: str,
        tasks: list[str] | None = None,
        agent: str = "terminus-2",
        agent_args: dict[str, Any] | None = None,
        environment: str = "docker",
        environment_args: dict[str, Any] | None = None,
        model: str = "openai/policy",
        reward: str = "reward",
        num_eval: int = 0,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        timeout_multiplier: float = 1.0,
        gateway_host: str = "127.0.0.1",
        python: str | None = None,
        output_dir: str | None = None,
    ) -> None:
        self.name = f"harbor/{source}"
        self._what = f"harbor:{source}"
        self._python = find_python(python)
        self._reward, self._timeout_multiplier = reward, timeout_multiplier
        self.limits = EpisodeLimits(max_turns, max_tokens)
        self._agent: dict[str, Any] = {"model_name": model, "kwargs": agent_args or {}, **_named(agent, "name")}
        self._place: dict[str, Any] = {**_named(environment, "type"), "kwargs": environment_args or {}}
        if environment == "local":
            self._place = {"import_path": LOCAL, "kwargs": environment_args or {}}
        self._found: dict[str, Any] = self._look(source, tasks)
        self._tasks: list[dict[str, Any]] = self._found["tasks"]
        self._num_eval = num_eval
        self.are_tasks_shared = num_eval == 0
        self._kept = None if output_dir is None else Path(output_dir).resolve()
        self._host = gateway_host
        self._gateway = Gateway(gateway_host)
        self._player: _TrialPlayer | None = None

    def _look(self, source: str, names: list[str] | None) -> dict[str, Any]:
        """The tasks of the suite, and what is missing for a run.

        Raises: ConfigError for a suite without tasks.
        """
        rule = " (Python 3.12 or later; args.python names one)"
        if (missing := missing_package(self._python, "harbor", rule)) is not None:
            return {"tasks": [], "problems": [missing]}
        suite: dict[str, Any] = {}
        if Path(source).is_dir():
            path = Path(source).resolve()
            suite = {"path": str(path)}
            if (path / "task.toml").is_file():
                suite = {"path": str(path.parent), "task_names": [path.name]}
        elif "/" not in source or source.count("/") == 1:
            name, _, version = source.partition("@")
            suite = {"name": name} | ({"version": version} if version else {})
        else:
            raise ConfigError(f"{self._what}: there is no directory {source!r}")
        chosen = {} if names is None else {"task_names": names}
        asked = {
            "suite": {**suite, **chosen},
            "agent": self._agent | {"env": _access_env(None)},
            "environment": self._place,
        }
        argv, env = [self._python, str(PROGRAM), "look", json.dumps(asked)], os.environ | env_for(self._python)
        answer = process.output_of(argv, timeout_s=_LOOK_S, env=env)
        if answer is None:
            raise ConfigError(f"{self._what}: {self._python} cannot import Harbor's modules; stretto works with 0.26")
        found = json.loads(answer)
        if not found["tasks"]:
            raise ConfigError(
                f"{self._what}: {found.get('no_tasks') or 'there are no tasks'}; "
                "give a directory whose directories have a task.toml, or a dataset that Harbor knows"
            )
        return found

    # -- the protocol of environments --

    def check(self) -> list[str]:
        """What is missing for a run, one sentence each."""
        problems = list(self._found["problems"])
        try:
            socket.create_server((self._host, 0)).close()
        except OSError as error:
            problems.append(f"gateway_host = {self._host!r} is no address of this machine: {error.strerror or error}")
        return problems

    def tasks(self, split: Split) -> TaskSource:
        if not self._tasks:
            raise ConfigError(f"{self._what}: {self._found['problems'][0]}")
        train, held_out = split_of(self._what, len(self._tasks), self._num_eval, "tasks")
        chosen = train if split == "train" else held_out

        def make(index: int) -> Task:
            config = self._tasks[chosen[index]]
            name = Path(config["path"]).name if config.get("path") else config["name"]
            return Task(env=self.name, task_id=name, data={"task": config})

        return TaskSource(make, len(chosen))

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        player = self._player
        if player is None or player.is_over:
            old, self._player = player, (player := _TrialPlayer(self._what, self._python))
            if old is not None:
                await old.close()
        trials = Path(tempfile.mkdtemp(prefix="stretto-harbor-")) if self._kept is None else self._kept
        try:
            async with self._gateway.open(ctx) as access:
                settings = {
                    "task": task.data["task"],
                    "trials_dir": str(trials),
                    "timeout_multiplier": self._timeout_multiplier,
                    "agent": self._agent | {"env": _access_env(access)},
                    "environment": self._place,
                }
                ended = await player.play(settings)
        finally:
            if self._kept is None:
                await asyncio.to_thread(shutil.rmtree, trials, ignore_errors=True)
        return self._result(task, ended, access)

    async def close(self) -> None:
        if self._player is not None:
            await self._player.close()
        await self._gateway.close()

    def _result(self, task: Task, ended: dict[str, Any], access: Access) -> RolloutResult:
        """Raises: the first error of a turn; EnvError for a trial that says nothing about the policy."""
        session, where = access.session, f"{self._what}, task {task.task_id}"
        if session.error is not None:
            raise session.error
        error = f"{ended['error']}: {ended['message']}" if ended["error"] else None
        if not session.answers and session.limit is not None:
            raise session.limit
        if not session.answers:
            raise EnvError(f"{where}: the agent ended without one reply of the policy. {error or ''}".rstrip())
        rewards: dict[str, float] = ended["rewards"] or {}
        is_limited = session.limit is not None
        if not rewards or not (ended["is_valid"] or is_limited):
            raise EnvError(f"{where}: {error or 'the verifier gave no reward'}")
        chosen = self._reward if self._reward in rewards or len(rewards) != 1 else next(iter(rewards))
        if chosen not in rewards:
            raise EnvError(
                f"{where}: the verifier gave no {self._reward!r}, but {', '.join(rewards)}; choose one with args.reward"
            )
        is_timeout = ended["error"] in _TIMEOUTS
        metrics = {f"rewards/{name}": float(value) for name, value in rewards.items() if name != chosen}
        metrics |= {"turns": float(len(session.answers)), "conversations": float(session.num_conversations)}
        return RolloutResult(
            reward=float(rewards[chosen]), metrics=metrics, is_truncated=is_timeout or is_limited, is_timeout=is_timeout
        )


def _named(text: str, key: str) -> dict[str, str]:
    """An agent or an environment by its name, or by `module:Class`."""
    return {"import_path": text} if ":" in text else {key: text}


def _access_env(access: Access | None) -> dict[str, str]:
    """The variables of the agent; without an access, values for Harbor's checks."""
    if access is not None:
        return access.env
    url, key = "http://127.0.0.1:1", "none"
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}


class _TrialPlayer:
    """The process of Harbor's Python that plays the trials of this worker."""

    def __init__(self, what: str, python: str) -> None:
        self._what = what
        self._log = Path(tempfile.mkdtemp(prefix="stretto-hub-"), "harbor.log")
        own, other = socket.socketpair()
        argv = [python, str(PROGRAM), "play", str(other.fileno())]
        self._child = process.start(
            what, argv, env=env_for(python), log=self._log, pass_fds=[other.fileno()], level=logging.INFO
        )
        other.close()
        self._own = own
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    @property
    def is_over(self) -> bool:
        """The process has ended."""
        return self._child.returncode is not None

    async def play(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The end of a trial. If this is cancelled, so is the trial.

        Raises: EnvError if Harbor cannot play it.
        """
        async with self._opening:
            if self._reading is None:
                reader, self._writer = await asyncio.open_connection(sock=self._own, limit=_MAX_LINE_BYTES)
                self._reading = asyncio.create_task(self._read(reader))
        number = next(self._numbers)
        self._waiting[number] = future = asyncio.get_running_loop().create_future()
        try:
            if self._reading.done():
                raise EnvError(self._lost())
            self._send({"id": number, "trial": settings})
            answer = await future
        except asyncio.CancelledError:
            self._send({"id": number, "cancel": True})
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise EnvError(f"{self._what}: {answer['error']}")
        return answer["result"]

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        else:
            self._own.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._child.wait()
        await process.stop([self._child], grace_s=1.0)
        if self._reading is not None:
            self._reading.cancel()
        shutil.rmtree(self._log.parent, ignore_errors=True)

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                answer = json.loads(line)
                if (future := self._waiting.get(answer["id"])) is not None and not future.done():
                    future.set_result(answer)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EnvError(self._lost()))

    def _lost(self) -> str:
        return f"{self._what}: the process of Harbor has ended; its last lines:\n" + "\n".join(self._child.tail())
