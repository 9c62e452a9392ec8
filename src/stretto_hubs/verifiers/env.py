"""Tasksets of verifiers 0.4 as environments; imported in worker processes only.

verifiers plays the task: its harness sends requests to a server of verifiers, which passes them to the
`RolloutClient` of policy.py instead of an engine, and that asks the context of the rollout for a turn. So tokens,
logprobs and versions are recorded as for every other environment, and what is trained is what the engine saw.
The run of one agent (a trace) is one stream of samples; where a harness changes earlier messages, the recorder
opens a branch.

Two defaults differ from those of verifiers, which need a cloud or one process per rollout: the runtime is
`subprocess`, and agents of a taskset without a harness of its own are played by `in_process` (harness.py). The
log says so.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from pydantic import BaseModel, ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.interception import server as interception_server
from verifiers.v1.mcp import launch as mcp_launch
from verifiers.v1.runtimes import PrimeConfig
from verifiers.v1.utils import loaders

from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import RolloutContext, RolloutResult, Split, TaskSource
from stretto.records.rollout import Task
from stretto_hubs.verifiers.harness import InProcess
from stretto_hubs.verifiers.packages import OWN_HARNESS
from stretto_hubs.verifiers.policy import EpisodeSessions, RolloutClient, RolloutClientConfig

logger = logging.getLogger(__name__)


class VerifiersEnv:
    """A verifiers taskset, with its agents and harnesses.

    taskset: its id, or a table with `id` and its own settings. num_eval: how many of its last tasks are held
    out (0: training and evaluation use all tasks). num_tasks: how many tasks of an endless taskset to take. select:
    which tasks to take (include, exclude, shuffle, seed, skip, limit). harness: id or table, of each agent for which
    the settings name none. settings: all other settings of a verifiers
    environment, such as `agent = { max_turns = 4, harness = { id = "null" } }` or `id`, an environment that plays it.
    """

    def __init__(
        self,
        taskset: str | dict[str, Any],
        num_eval: int = 0,
        num_tasks: int | None = None,
        select: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._env = self.configure(taskset, **settings)
        self._tasks = self._load(num_tasks, select or {})
        if not 0 <= num_eval < len(self._tasks):
            raise ConfigError(
                f"{self._what}: num_eval = {num_eval} must be 0 or more and less than its {len(self._tasks)} tasks."
            )
        self._num_eval = num_eval
        self.are_tasks_shared = num_eval == 0
        self._context = vf.ModelContext(model="policy", client=RolloutClientConfig(api_key_var="NONE"))
        self._serving: asyncio.Task[None] | None = None
        self._is_serving = asyncio.Event()
        self._is_closing = asyncio.Event()

    # -- building --

    def configure(
        self, taskset: str | dict[str, Any], harness: str | dict[str, Any] | None = None, **settings: Any
    ) -> vf.Env:
        """The environment of verifiers, without its tasks. harness: of each agent that has none in the settings.

        Raises: ConfigError for settings that do not fit.
        """
        data = {"taskset": {"id": taskset} if isinstance(taskset, str) else dict(taskset), **settings}
        taskset_id = data["taskset"].get("id")
        if not isinstance(taskset_id, str) or not taskset_id:
            raise ConfigError('verifiers: args.taskset names no taskset; give `taskset = { id = "..." }`.')
        self.name = f"verifiers/{taskset_id}"
        self._what = f"verifiers taskset {taskset_id!r}"
        logging.getLogger("verifiers").setLevel(logging.WARNING)  # it logs two lines per rollout
        _install()
        return self._build(taskset_id, data, {"id": harness} if isinstance(harness, str) else harness)

    def _build(self, taskset_id: str, data: dict[str, Any], harness: dict[str, Any] | None) -> vf.Env:
        try:
            config_type = loaders.env_config_type(taskset_id, data.get("id") or "")
            unknown = sorted(set(data) - set(config_type.model_fields))
            if unknown:
                known = ", ".join(sorted(config_type.model_fields))
                raise ConfigError(f"{self._what}: no setting {unknown[0]!r}; it has {known}.")
            self._set_defaults(config_type, taskset_id, data, harness)
            config = loaders.resolve_env_config(data)
            _refuse_retries(self._what, config)
            return loaders.load_environment(config)
        except ValidationError as cause:
            raise ConfigError(f"{self._what}: {_problems(cause)}") from cause
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as cause:
            raise ConfigError(f"{self._what}: {cause}") from cause

    def _set_defaults(
        self, config_type: type[BaseModel], taskset_id: str, data: dict[str, Any], harness: dict[str, Any] | None
    ) -> None:
        """Set a local runtime, and the harness `in_process` if the taskset has none."""
        ships_harness = loaders.default_harness_id(taskset_id) == taskset_id
        for role, declared in agent_config_fields(config_type.model_construct()).items():
            chosen = dict(data.get(role) or {})
            if "runtime" not in chosen and isinstance(declared.runtime, PrimeConfig):
                chosen["runtime"] = {"type": "subprocess"}
                logger.info("%s: %s.runtime = subprocess (the default here)", self._what, role)
            if "harness" not in chosen and harness is not None:
                chosen["harness"] = harness
            if "harness" not in chosen and declared.harness is None and not ships_harness:
                chosen["harness"] = {"id": OWN_HARNESS}
                logger.info("%s: %s.harness = %s (the default here)", self._what, role, OWN_HARNESS)
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
            raise ConfigError(f"{self._what} is endless; set args.num_tasks.")
        tasks = list(taskset)
        if not tasks:
            raise ConfigError(f"{self._what} has no tasks.")
        return tasks

    # -- the protocol of environments --

    def tasks(self, split: Split) -> TaskSource:
        first = len(self._tasks) - self._num_eval
        chosen = range(first) if split == "train" else range(first if self._num_eval else 0, len(self._tasks))

        def make(index: int) -> Task:
            data = self._tasks[chosen[index]].data
            return Task(env=self.name, task_id=str(data.id or data.name or data.idx), data={"number": chosen[index]})

        return TaskSource(make, len(chosen))

    async def rollout(self, task: Task, ctx: RolloutContext) -> RolloutResult:
        await self._serve()
        sessions = EpisodeSessions(ctx, is_one=len(self._env._agent_specs) == 1)
        (slot,) = self._env.slots(self._tasks[task.data["number"]])
        try:
            result = await self._env.run_slot(slot, self._context, on_trace=sessions.add)
        finally:
            sessions.close()
        return sessions.result(result)

    async def close(self) -> None:
        """Stop tool servers and the interception server."""
        self._is_closing.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        """Start the servers that all rollouts share, once, in a task that enters and leaves their context."""
        if self._serving is None or (self._serving.done() and not self._is_closing.is_set()):
            self._is_serving.clear()
            self._serving = asyncio.create_task(self._keep_serving())
        up = asyncio.create_task(self._is_serving.wait())
        try:
            await asyncio.wait({up, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if self._serving.done() and not self._serving.cancelled() and (error := self._serving.exception()):
            raise EnvError(f"{self._what}: its servers do not start: {type(error).__name__}: {error}") from error

    async def _keep_serving(self) -> None:
        async with self._env.serving():
            self._is_serving.set()
            await self._is_closing.wait()


def _problems(error: ValidationError) -> str:
    """The validation errors of verifiers settings, in one line."""
    texts = []
    for each in error.errors():
        where = ".".join(map(str, each["loc"]))
        is_unknown = each["type"] == "extra_forbidden"
        texts.append(f"there is no setting {where!r}" if is_unknown else f"{where} = {each['input']!r}: {each['msg']}")
    return "; ".join(texts)


def _refuse_retries(what: str, config: Any) -> None:
    """Refuse retries of verifiers: tokens of a failed attempt would be trained with the reward of another.

    Raises: ConfigError.
    """
    for where, retries in (
        ("retries", config.retries),
        *((f"{role}.retries", spec.retries) for role, spec in agent_config_fields(config).items()),
    ):
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            raise ConfigError(
                f"{what}: {where}: stretto retries failed rollouts itself; remove it and set "
                "orchestrator.max_rollout_retries."
            )


def _install() -> None:
    """Register harness and policy: verifiers finds a harness by module name, a client by its config class."""
    plugin = ModuleType(OWN_HARNESS)
    vars(plugin).update(InProcess=InProcess, __all__=["InProcess"])
    sys.modules.setdefault(OWN_HARNESS, plugin)
    resolve = interception_server.resolve_client
    if getattr(resolve, "is_ours", False):
        return

    def resolve_client(config: Any) -> Any:
        return RolloutClient() if isinstance(config, RolloutClientConfig) else resolve(config)

    vars(resolve_client)["is_ours"] = True
    interception_server.resolve_client = resolve_client
    mcp_launch._read_back_port = _removing_file(mcp_launch._read_back_port)


def _removing_file(read_back_port: Callable[..., Awaitable[int]]) -> Callable[..., Awaitable[int]]:
    """Remove the file in /tmp through which a tool server tells its port; verifiers 0.4 leaves it there."""

    async def read_and_remove(runtime: Any, path: str) -> int:
        try:
            return await read_back_port(runtime, path)
        finally:
            if runtime.type == "subprocess":
                Path(path).unlink(missing_ok=True)

    return read_and_remove
