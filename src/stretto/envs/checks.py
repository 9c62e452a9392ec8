"""What environments of hubs and of verifiers lack, before anything is started."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from stretto.base import process
from stretto.envs import find
from stretto.envs.base import Environment, load_environment, tasks_of

_VERIFIERS_S = 120.0


def missing_for(env_id: str, args: dict[str, Any]) -> list[str]:
    """What an environment needs and does not find, one sentence each: packages, programs, a server that answers.

    Raises: ConfigError for arguments that do not fit.
    """
    if find.hub_of(env_id) is None:
        return find.missing_plugins(env_id, args)
    env: Any = load_environment(env_id, args, in_worker=True)
    return env.check()


def look_into(env_id: str, args: dict[str, Any], name: str) -> tuple[str, list[str]]:
    """What is known of an environment that runs in worker processes: its tasks, and what is missing.

    Raises: ConfigError for arguments that do not fit, also for those of verifiers' tasksets, agents and harnesses.
    """
    if find.hub_of(env_id) is not None:
        env: Any = load_environment(env_id, args, name, in_worker=True)
        missing = env.check()
        return "" if missing else _tasks_text(env), missing
    missing = find.missing_plugins(env_id, args)
    if missing or not find.is_verifiers(env_id):
        return "", missing
    settings = json.dumps(find.verifiers_args(env_id, args))
    argv = [sys.executable, "-m", "stretto.envs.verifiers.check", settings]
    found = process.output_of(argv, timeout_s=_VERIFIERS_S, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    if found is None:
        return "", [f"verifiers cannot be imported: {sys.executable} -c 'import verifiers.v1' says why"]
    return "", json.loads(found.splitlines()[-1])


def _tasks_text(env: Environment) -> str:
    source = tasks_of(env, "train")
    count = "without end" if source.num_tasks is None else str(source.num_tasks)
    return f"tasks {count}; the first is {source.task(0).task_id}; "
