"""Harbor's tasks and trials for another process. It runs in Harbor's Python and imports nothing of stretto.

    python play_trials.py look JSON     prints the tasks of a suite, and what is missing for a run
    python play_trials.py play FD       plays trials at the requests that come on a socket, one JSON object a line

A request is `{"id": 1, "trial": {...}}`, with the fields of Harbor's TrialConfig, or `{"id": 1, "cancel": true}`. The
answer to a trial is `{"id": 1, "result": {...}}` or `{"id": 1, "error": "..."}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from functools import partial
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.environments.factory import EnvironmentFactory
from harbor.models.job.config import DatasetConfig
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TrialConfig
from harbor.trial.trial import Trial

LOCAL = "local_environment:LocalEnvironment"
MAX_LINE_BYTES = 2**26
_NUM_NAMED = 5


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """The tasks of a suite, and sentences about what is missing."""
    problems = [*_problem_of("environment", asked["environment"]), *_problem_of("agent", asked["agent"])]
    try:
        tasks = asyncio.run(DatasetConfig.model_validate(asked["suite"]).get_task_configs())
    except Exception as error:  # whatever a registry's client raises
        return {"tasks": [], "problems": problems, "no_tasks": f"{type(error).__name__}: {error}"}
    if asked["environment"].get("import_path") == LOCAL:
        problems += _unplayable(tasks)
    return {"tasks": [task.model_dump(mode="json", exclude_none=True) for task in tasks], "problems": problems}


def _problem_of(kind: str, settings: dict[str, Any]) -> list[str]:
    """What Harbor's own checks before a job say of an agent or an environment."""
    try:
        if kind == "agent":
            AgentFactory.run_preflight(AgentConfig.model_validate(settings))
        else:
            config = EnvironmentConfig.model_validate(settings)
            EnvironmentFactory.run_preflight(config.type, config.import_path, config.kwargs)
    except (Exception, SystemExit) as error:
        return [f"{kind}: {' '.join(str(error).split())}"]
    return []


def _unplayable(tasks: list[Any]) -> list[str]:
    """The tasks that the environment `local` cannot play, with the reason."""
    from local_environment import why_not

    found = []
    for config in tasks:
        if config.path is None or config.git_url is not None:
            return ['environment: "local" plays tasks of directories only']
        task = Task(task_dir=config.path)
        if (reason := why_not(task.paths.environment_dir, task.config.environment)) is not None:
            found.append(f"task {task.short_name}: {reason}")
    more = [f"and {len(found) - _NUM_NAMED} more tasks"] if len(found) > _NUM_NAMED else []
    return found[:_NUM_NAMED] + more


async def play(wire: socket.socket) -> None:
    """Play trials until the socket is closed; then the rest is cancelled."""
    reader, writer = await asyncio.open_connection(sock=wire, limit=MAX_LINE_BYTES)
    running: dict[int, asyncio.Task[None]] = {}
    while line := await reader.readline():
        request = json.loads(line)
        number = request["id"]
        if "trial" in request:
            running[number] = asyncio.create_task(_answer(number, request["trial"], writer))
            running[number].add_done_callback(partial(_forget, running, number))
        elif number in running:
            running[number].cancel()
    for task in running.values():
        task.cancel()
    await asyncio.gather(*running.values(), return_exceptions=True)


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    running.pop(number, None)


async def _answer(number: int, settings: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    answer: dict[str, Any] = {"id": number}
    try:
        trial = await Trial.create(TrialConfig.model_validate(settings))
        answer["result"] = _summary(await trial.run())
    except asyncio.CancelledError:
        answer["error"] = "cancelled"
    except (Exception, SystemExit) as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(ConnectionError):
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()


def _summary(result: Any) -> dict[str, Any]:
    error = result.exception_info
    return {
        "rewards": result.verifier_result.rewards if result.verifier_result is not None else None,
        "is_valid": result.reward_valid,
        "error": None if error is None else error.exception_type,
        "message": None if error is None else error.exception_message,
    }


def main() -> None:
    sys.path.append(os.getcwd())  # agents of one's own
    mode, argument = sys.argv[1:]
    if mode == "look":
        out = os.dup(1)
        os.dup2(2, 1)  # what libraries print is not the answer
        os.write(out, json.dumps(look(json.loads(argument))).encode())
        return
    logging.getLogger().setLevel(logging.WARNING)
    asyncio.run(play(socket.socket(fileno=int(argument))))


if __name__ == "__main__":
    main()
