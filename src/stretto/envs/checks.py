"""What environments of hubs and tasksets lack, before anything is started."""

from __future__ import annotations

from typing import Any

from stretto.envs import find
from stretto.envs.base import Environment, load_environment, tasks_of


def missing_for(env_id: str, args: dict[str, Any]) -> list[str]:
    """What an environment needs and does not find, one sentence each: packages, programs, a server that answers.

    Raises: ConfigError for arguments that do not fit.
    """
    if find.hub_of(env_id) is None:
        tasksets = find.tasksets_of(env_id)
        return [] if tasksets is None else tasksets.missing(env_id, args)
    env: Any = load_environment(env_id, args, in_worker=True)
    return env.check()


def look_into(env_id: str, args: dict[str, Any], name: str) -> tuple[str, list[str]]:
    """What is known of an environment that runs in worker processes: its tasks, and what is missing.

    Raises: ConfigError for arguments that do not fit.
    """
    if find.hub_of(env_id) is None:
        tasksets = find.tasksets_of(env_id)
        return "", [] if tasksets is None else tasksets.look_into(env_id, args)
    env: Any = load_environment(env_id, args, name, in_worker=True)
    missing = env.check()
    return "" if missing else _tasks_text(env), missing


def _tasks_text(env: Environment) -> str:
    source = tasks_of(env, "train")
    count = "without end" if source.num_tasks is None else str(source.num_tasks)
    return f"tasks {count}; the first is {source.task(0).task_id}; "
