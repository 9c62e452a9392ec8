"""Tasksets of verifiers 0.4 as environments; imported in worker processes only.

verifiers plays the task: its harness calls a server of its own, which calls the `Policy` below instead of an
engine, and that asks the context of the rollout. So tokens, logprobs and versions are written down by the
recorder as for every other environment, and what is trained is what the engine saw. An agent's run (a trace)
is one stream of samples; where messages come back changed the recorder opens a branch.

Defaults differ from those of verifiers where those need a cloud or a process a rollout: the runtime is
`subprocess`, and roles of a taskset without a harness of its own are played by `in_process` (harness.py). Both
are said in the log. The policy that harnesses ask, and what an episode is worth, are in policy.py.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.interception import server as interception_server
from verifiers.v1.runtimes import PrimeConfig
from verifiers.v1.utils import loaders

from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import RolloutContext, RolloutResult, Split, TaskSource
from stretto.envs.verifiers.harness import InProcess
from stretto.envs.verifiers.policy import Policy, PolicyConfig, Seats
from stretto.records.rollout import Task

logger = logging.getLogger(__name__)

IN_PROCESS = "in_process"
"""Id of the harness that plays roles where nothing else is chosen."""


class VerifiersEnv:
    """A taskset, its agents, and how they play.

    taskset: its id, or a table with `id` and its own settings. num_eval: so many of its last tasks are held
    out (0: training and evaluation have all of them). num_tasks: bounds an endless taskset. select: which tasks
    to take (include, exclude, shuffle, seed, skip, limit). settings: all else of a verifiers environment, such as
    `agent = { max_turns = 4, harness = { id = "null" } }` or `id`, an environment that plays the taskset.
    """

    def __init__(
        self,
        taskset: str | dict[str, Any],
        num_eval: int = 0,
        num_tasks: int | None = None,
        select: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        data = {"taskset": {"id": taskset} if isinstance(taskset, str) else dict(taskset), **settings}
        taskset_id = data["taskset"].get("id")
        if not isinstance(taskset_id, str) or not taskset_id:
            raise ConfigError('verifiers: args.taskset names no taskset; give `taskset = { id = "..." }`.')
        self.name = f"verifiers/{taskset_id}"
        self._what = f"verifiers taskset {taskset_id!r}"
        logging.getLogger("verifiers").setLevel(logging.WARNING)  # it has two lines for every rollout
        _install()
        self._env = self._build(taskset_id, data)
        self._tasks = self._load(num_tasks, select or {})
        if not 0 <= num_eval < len(self._tasks):
            raise ConfigError(f"{self._what}: num_eval = {num_eval}, and it has {len(self._tasks)} tasks.")
        self._num_eval = num_eval
        self.are_tasks_shared = num_eval == 0
        self._context = vf.ModelContext(model="policy", client=PolicyConfig(api_key_var="NONE"))
        self._serving: asyncio.Task[None] | None = None
        self._is_up = asyncio.Event()
        self._is_closing = asyncio.Event()

    # -- building --

    def _build(self, taskset_id: str, data: dict[str, Any]) -> vf.Env:
        try:
            config_type = loaders.env_config_type(taskset_id, data.get("id") or "")
            unknown = sorted(set(data) - set(config_type.model_fields))
            if unknown:
                known = ", ".join(sorted(config_type.model_fields))
                raise ConfigError(f"{self._what}: no setting {unknown[0]!r}; it has {known}.")
            self._set_defaults(config_type, taskset_id, data)
            config = loaders.resolve_env_config(data)
            _refuse_retries(self._what, config)
            return loaders.load_environment(config)
        except ValidationError as cause:
            raise ConfigError(f"{self._what}: {_problems(cause)}") from cause
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as cause:
            raise ConfigError(f"{self._what}: {cause}") from cause

    def _set_defaults(self, config_type: type, taskset_id: str, data: dict[str, Any]) -> None:
        """Local runtimes, and a harness without a process where the taskset brings none."""
        ships_harness = loaders.default_harness_id(taskset_id) == taskset_id
        for role, declared in agent_config_fields(config_type.model_construct()).items():
            chosen = dict(data.get(role) or {})
            if "runtime" not in chosen and isinstance(declared.runtime, PrimeConfig):
                chosen["runtime"] = {"type": "subprocess"}
                logger.info("%s: %s.runtime = subprocess (the default here)", self._what, role)
            if "harness" not in chosen and declared.harness is None and not ships_harness:
                chosen["harness"] = {"id": IN_PROCESS}
                logger.info("%s: %s.harness = %s (the default here)", self._what, role, IN_PROCESS)
            data[role] = chosen

    def _load(self, num_tasks: int | None, select: dict[str, Any]) -> list[vf.Task]:
        taskset = self._env.taskset
        try:
            if num_tasks is not None:
                taskset = taskset.take(num_tasks)
            taskset = taskset.select(SelectConfig.model_validate(select))
        except ValidationError as cause:
            raise ConfigError(f"{self._what}: select: {_problems(cause)}") from cause
        except ValueError as cause:
            raise ConfigError(f"{self._what}: select: {cause}") from cause
        if not taskset.bounded:
            raise ConfigError(f"{self._what} has no end of tasks; give args.num_tasks.")
        tasks = list(taskset)
        if not tasks:
            raise ConfigError(f"{self._what} has no tasks.")
        return tasks

    # -- what an environment does --

    def tasks(self, split: Split) -> TaskSource:
        first = len(self._tasks) - self._num_eval
        chosen = range(first) if split == "train" else range(first if self._num_eval else 0, len(self._tasks))

        def make(index: int) -> Task:
            data = self._tasks[chosen[index]].data
            return Task(
                env=self.name, task_id=str(data.id or data.name or data.idx), data={"number": chosen[index]}
            )

        return TaskSource(make, len(chosen))

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        await self._serve()
        episode = Seats(ctx, is_one=len(self._env._agent_specs) == 1)
        (slot,) = self._env.slots(self._tasks[task.data["number"]])
        try:
            played = await self._env.run_slot(slot, self._context, on_trace=episode.add)
        finally:
            episode.leave()
        return episode.result(played)

    async def close(self) -> None:
        """Stop tool servers and the interception server."""
        self._is_closing.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        """Bring up what all rollouts share, once, in a task of its own, which has to leave what it entered."""
        if self._serving is None or (self._serving.done() and not self._is_closing.is_set()):
            self._is_up.clear()
            self._serving = asyncio.create_task(self._hold())
        up = asyncio.create_task(self._is_up.wait())
        await asyncio.wait({up, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._serving.done() and not self._serving.cancelled() and (error := self._serving.exception()):
            raise EnvError(
                f"{self._what}: its servers do not start: {type(error).__name__}: {error}"
            ) from error

    async def _hold(self) -> None:
        async with self._env.serving():
            self._is_up.set()
            await self._is_closing.wait()


def _problems(error: ValidationError) -> str:
    """What is wrong with settings of verifiers, in one line."""
    texts = []
    for each in error.errors():
        where = ".".join(map(str, each["loc"]))
        is_unknown = each["type"] == "extra_forbidden"
        texts.append(
            f"there is no setting {where!r}" if is_unknown else f"{where} = {each['input']!r}: {each['msg']}"
        )
    return "; ".join(texts)


def _refuse_retries(what: str, config: Any) -> None:
    """Tokens of an attempt that verifiers gave up would be trained with the reward of another."""
    for where, retries in (
        ("retries", config.retries),
        *((f"{role}.retries", spec.retries) for role, spec in agent_config_fields(config).items()),
    ):
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            raise ConfigError(
                f"{what}: {where}: failed rollouts are played again by stretto; leave it out and set "
                "orchestrator.max_rollout_retries."
            )


def _install() -> None:
    """Let verifiers find the harness and the policy: it looks for one by module name, for the other by config."""
    plugin = ModuleType(IN_PROCESS)
    plugin.InProcess, plugin.__all__ = InProcess, ["InProcess"]
    sys.modules.setdefault(IN_PROCESS, plugin)
    resolve = interception_server.resolve_client
    if getattr(resolve, "is_ours", False):
        return

    def resolve_client(config: Any) -> Any:
        return Policy() if isinstance(config, PolicyConfig) else resolve(config)

    resolve_client.is_ours = True
    interception_server.resolve_client = resolve_client
