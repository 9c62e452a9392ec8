"""repo-repair: a mistake in a real Python package, to be found and repaired with a shell and an editor.

The tasks are those of a bank (bank.py), which `make.py` makes of packages. The policy finds a package's sources with
one mistake in them and the package's tests, of which some are left out; it calls tools until it replies without a
call. Reward 1 if all tests pass that pass with the published sources, the hidden ones too, else 0; with `partial` it is
the share of the tests that the mistake fails, or 0 if another test fails.

An episode is a directory, and a process only while a command runs. With a run directory its steps are in a journal
there (rewards/workspace.py), from which a rollout that is continued after a kill takes them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shlex
import tempfile
import urllib.parse
import uuid
import weakref
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np

from stretto.base.errors import ConfigError
from stretto.envs.base import (
    EpisodeInfo,
    EpisodeLimits,
    Message,
    Reply,
    RolloutContext,
    RolloutResult,
    RunInfo,
    Split,
    TaskSource,
)
from stretto.envs.multi_turn import Episode, ToolEnv
from stretto.records.rollout import Task
from stretto_repair import desk
from stretto_repair.bank import TaskRow, function_of, load_bank
from stretto_repair.desk import DESK, Desk
from stretto_repair.suite import environment, outcomes_of
from stretto_repair.workspace import Workspace, remove_leftovers
from stretto_sandbox.sandbox import Sandbox, SandboxLimits
from stretto_sandbox.sandbox_keeper import remove

T = TypeVar("T")
INSTRUCTION = (
    "This directory holds the source of {package}, a Python package. One place in it is wrong, and tests fail because "
    "of it: `python -m pytest` runs them. Find the mistake and repair it. Leave the tests as they are; others, which "
    "are not in this directory, must pass too. When you are done, reply without calling a tool."
)


BLOCKS = (
    "\nTo run a shell command, reply with it between a line ```sh and a line ```. You are then shown what it prints. "
    "A reply without such a block ends your work."
)
BLOCK = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class RepoRepair(ToolEnv):
    """The tasks of the directory `tasks`, played with at most max_turns replies.

    calls: `tools`, or `blocks` for a model whose template has none: the first block of shell code of a reply is run.
    """

    tools = (desk.run, desk.view, desk.create, desk.str_replace)
    tool_timeout_s = None  # a call waits until the sandbox has room, and has command_timeout_s from then on

    def __init__(
        self,
        tasks: str,
        max_turns: int | None = 100,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
        command_timeout_s: float = 30.0,
        test_timeout_s: float = 120.0,
        memory_bytes: int = 1 << 30,
        work_bytes: int = 64 << 20,
        max_output_chars: int = 4000,
        partial: bool = False,
        calls: Literal["tools", "blocks"] = "tools",
        backend: Literal["auto", "bubblewrap", "subprocess"] = "auto",
        max_concurrent: int | None = None,
        instruction: str = INSTRUCTION,
        run: RunInfo | None = None,
    ) -> None:
        if max_output_chars < 2 or command_timeout_s <= 0 or test_timeout_s <= 0:
            raise ConfigError(
                f"repo-repair: max_output_chars = {max_output_chars}, command_timeout_s = {command_timeout_s:g}, "
                f"test_timeout_s = {test_timeout_s:g}; give at least 2 characters, and more than 0 seconds."
            )
        self.name = "repo-repair"
        self.bank = load_bank(Path(tasks))
        self.limits = EpisodeLimits(max_turns, max_tokens, timeout_s)
        self.max_output_chars, self.partial, self.calls = max_output_chars, partial, calls
        self.instruction = instruction + (BLOCKS if calls == "blocks" else "")
        limits = SandboxLimits(
            wall_s=command_timeout_s, memory_bytes=memory_bytes, max_processes=64, work_bytes=work_bytes, max_depth=64
        )
        self.commands = Sandbox(limits, backend, max_concurrent)
        tests = SandboxLimits(**(asdict(limits) | {"wall_s": test_timeout_s}))
        self.tests = Sandbox(tests, backend, max_concurrent)
        self._directory = None if run is None or run.directory is None else Path(run.directory)
        self._is_clean = False  # of directories whose owners were killed
        # Not in threads: Python 3.11 cannot parse in two threads at once.
        self._given = functools.lru_cache(256)(self._files_of)
        self._rows: dict[str, dict[str, Any]] = {}  # solved tasks for `sft`

    @property
    def directory(self) -> Path:
        """Where the episodes are: below the run directory, else one that ends with this environment."""
        if self._directory is None:
            temporary = tempfile.mkdtemp(prefix="stretto-repair-")
            os.chmod(temporary, 0o711)  # commands may run as another user
            weakref.finalize(self, remove, temporary)
            self._directory = Path(temporary)
        return self._directory / urllib.parse.quote(self.name, safe="")

    def tasks(self, split: Split) -> TaskSource:
        rows = self.bank.of_split(split)
        if not rows:
            raise ConfigError(
                f"repo-repair: {self.bank.folder} has no tasks of the split {split!r}; make more of them."
            )

        def make(index: int) -> Task:
            row = rows[index]
            return Task(env=self.name, task_id=row.task_id, data={"task": row.task_id, "package": row.package})

        return TaskSource(make, len(rows), fingerprint=self.bank.fingerprint)

    def prompt(self, task: Task) -> list[Message]:
        text = self.instruction.replace("{package}", task.data["package"].replace("-", " ", 1))
        return [{"role": "user", "content": text}]

    # -- an episode --

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        name = ctx.episode.rollout_id if ctx.episode is not None else uuid.uuid4().hex
        if not self._is_clean:
            self._is_clean = True
            await asyncio.to_thread(remove_leftovers, self.directory)
        async with self._desk(self._row(task), name):
            return await super().rollout(task, ctx)

    def _files_of(self, task_id: str) -> dict[str, bytes]:
        """The files with which a task begins."""
        row = self.bank.tasks[task_id]
        return self.bank.packages[row.package].given(row)

    @asynccontextmanager
    async def _desk(self, row: TaskRow, name: str) -> AsyncIterator[Desk]:
        """The desk of an episode, which the tools find."""
        package, limits = self.bank.packages[row.package], self.commands.limits
        home = self.directory / urllib.parse.quote(name, safe="")
        origin = blake2b(f"{self.bank.fingerprint} {row.task_id}".encode()).digest()
        async with Workspace(
            home, self._given(row.task_id), self.commands, origin=origin, readable=[self.bank.lib]
        ) as work:
            variables = environment(work.path, self.bank.lib, package.roots)
            token = DESK.set(found := Desk(work, variables, asdict(limits), self.max_output_chars))
            try:
                yield found
            finally:
                DESK.reset(token)

    def tool_schemas(self) -> list[dict[str, Any]]:
        return super().tool_schemas() if self.calls == "tools" else []

    async def respond(self, episode: Episode, reply: Reply) -> list[Message] | None:
        """What a block prints; a reply without a call ends the episode."""
        found = BLOCK.search(reply.text) if self.calls == "blocks" else None
        return None if found is None else [{"role": "user", "content": await desk.run(found[1])}]

    async def score(self, episode: Episode) -> RolloutResult:
        found, row = DESK.get(), self._row(episode.task)
        passed = json.loads(await found.work.step(b"score", lambda: self._passed(row)))
        counts = {"commands": found.num_commands, "edits": found.num_edits, "replayed": found.work.num_replayed}
        metrics = {name: float(count) for name, count in counts.items()}
        return RolloutResult(reward=self.reward_of(passed), metrics=metrics | passed)

    def reward_of(self, passed: dict[str, float]) -> float:
        """The reward for these shares of tests."""
        share = passed["failing_passed"] if self.partial else float(passed["failing_passed"] == 1.0)
        return share if passed["others_passed"] == 1.0 else 0.0

    async def _passed(self, row: TaskRow) -> str:
        """Which shares of the tests pass now, as JSON: those that the mistake fails, hidden ones among them; others."""
        package = self.bank.packages[row.package]
        files = package.scored(row, await DESK.get().work.changes())
        outcomes = await outcomes_of(self.tests, package, files, self.bank.lib)
        passing = {test for test, outcome in outcomes.items() if outcome == "passed"}
        failing, hidden = set(row.failing), set(row.hidden)
        parts: dict[str, list[bool]] = {"failing_passed": [], "hidden_passed": [], "others_passed": []}
        for test in package.row.passing:
            is_failing = function_of(test) in failing
            parts["failing_passed" if is_failing else "others_passed"].append(test in passing)
            if function_of(test) in hidden:
                parts["hidden_passed"].append(test in passing)
        return json.dumps({name: sum(each) / len(each) if each else 1.0 for name, each in parts.items()})

    def _row(self, task: Task) -> TaskRow:
        return self.bank.tasks[task.data["task"]]

    # -- solved tasks --

    def solution(self, task: Task) -> list[tuple[str, dict[str, Any]]]:
        """Calls of tools that solve a task: look at the failing tests and at the place, repair it, run the tests."""
        row = self._row(task)
        package, mutation = self.bank.packages[row.package], row.mutation
        right = package.files[row.path].decode().splitlines(keepends=True)
        wrong = package.mistaken(row)[row.path].decode().splitlines(keepends=True)
        first, last, text = mutation.line - 1, mutation.line, "".join(wrong)
        while text.count("".join(wrong[first:last])) > 1:
            first, last = max(first - 1, 0), min(last + 1, len(wrong))
        old, new = "".join(wrong[first:last]), "".join(right[first:last])
        tests = {"command": "python -m pytest -q -x --tb=short"}
        around = {"path": row.path, "first": max(mutation.line - 3, 1), "last": min(mutation.line + 3, len(wrong))}
        change = {"path": row.path, "old": old, "new": new}
        return [("run", tests), ("view", around), ("str_replace", change), ("run", tests)]

    def sft_rows(self, num_rows: int, seed: int) -> list[dict[str, Any]]:
        """Solved tasks of the training split, in turn; their commands run in the sandbox."""
        source = self.tasks("train")
        tasks = [source.task(index + seed) for index in range(num_rows)]
        return _in_own_loop(self._solve_all(tasks))

    async def _solve_all(self, tasks: list[Task]) -> list[dict[str, Any]]:
        missing = {task.task_id: task for task in tasks if task.task_id not in self._rows}
        rows = await asyncio.gather(*map(self._solve, missing.values()), return_exceptions=True)
        for name, row in zip(missing, rows):
            if isinstance(row, BaseException):
                raise row
            self._rows[name] = row
        return [self._rows[task.task_id] for task in tasks]

    async def _solve(self, task: Task) -> dict[str, Any]:
        ctx = SolvingContext(self.solution(task), as_blocks=self.calls == "blocks")
        result = await self.rollout(task, cast(RolloutContext, ctx))
        if self.reward_of(result.metrics) != 1.0:
            raise ConfigError(
                f"repo-repair: the tests of {task.task_id} fail here without the mistake: make tasks again."
            )
        return {"messages": ctx.messages} | ({"tools": schemas} if (schemas := self.tool_schemas()) else {})

    async def close(self) -> None:
        """Remove directories that no rollout uses."""
        await asyncio.to_thread(remove_leftovers, self.directory)


class SolvingContext:
    """A policy that makes given calls, one per reply, and then says that it is done. It is all that tools need."""

    episode: EpisodeInfo | None = None

    def __init__(self, calls: list[tuple[str, dict[str, Any]]], *, as_blocks: bool = False) -> None:
        self._calls, self._as_blocks, self.messages = list(calls), as_blocks, list[Message]()

    async def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **sampling: Any) -> Reply:
        message: Message = {"role": "assistant", "content": "" if self._calls else "Done."}
        if self._calls:
            name, arguments = self._calls.pop(0)
            if self._as_blocks:
                message["content"] = f"```sh\n{as_command(name, arguments)}\n```"
            else:
                message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        self.messages = [*messages, message]
        text = message["content"]
        return Reply(message=message, text=text, token_ids=np.zeros(0, np.int32), finish_reason="stop")


def as_command(name: str, arguments: dict[str, Any]) -> str:
    """A call of `solution` as a shell command."""
    if name == "run":
        return arguments["command"]
    if name == "view":
        return f"sed -n {arguments['first']},{arguments['last']}p {shlex.quote(arguments['path'])}"
    change = f"path.write_text(path.read_text().replace({arguments['old']!r}, {arguments['new']!r}))"
    return f"python - <<'END'\nfrom pathlib import Path\npath = Path({arguments['path']!r})\n{change}\nEND"


def _in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, for code that is not async and may be called by code that is."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, work).result()
