"""The messages between the orchestrator and a worker process of an environment, and their bytes.

There is one socket pair per worker; every message is one record in one blob (records/codec.py). The orchestrator
sends `Open` once; the worker answers `Ready` or `OpenFailed`. Then the orchestrator starts calls (`StartCall`). The
worker ends each with exactly one `CallResult`, `PromptResult` or `CallFailed`, also after `CancelCall`. During a call
the worker may send a `TurnRequest` for a turn of the policy; each is answered by one `TurnReply` or `TurnFailed`; and
a `ModelRequest` for a reply of a frozen model, which is answered by one `ModelAnswer` or `TurnFailed`. A
`Heartbeat` per second says that the worker's event loop runs. The orchestrator's end is workers/pool.py, the worker's
is workers/child.py.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Literal

import msgspec
import numpy as np

from stretto.base import errors
from stretto.base.errors import EnvError, StrettoError, WireError
from stretto.envs.base import (
    EpisodeInfo,
    EpisodeLimits,
    LimitReached,
    Message,
    OutOfContext,
    Reply,
    RolloutResult,
    Split,
)
from stretto.envs.models import ModelReply
from stretto.records.codec import BLOB_HEAD_BYTES, blob_bytes, decode_blob, encode_blob
from stretto.records.rollout import Task

HEARTBEAT_S = 1.0

_KINDS: dict[str, type[StrettoError]] = {
    kind.__name__: kind
    for kind in (
        errors.ConfigError,
        errors.DataError,
        errors.EngineError,
        EnvError,
        WireError,
        LimitReached,
        OutOfContext,
    )
}


def task_at(env: str, split: Split, index: int) -> Task:
    """The task as the orchestrator has it where workers play the episodes: its split and index, without its data."""
    return Task(env=env, task_id=f"{split}-{index}", data={"split": split, "index": index})


def split_and_index(task: Task) -> tuple[Split, int] | None:
    """Split and index of a task that `task_at` made; None for an environment's own task."""
    if task.data.keys() != {"split", "index"}:
        return None
    split, index = task.data["split"], task.data["index"]
    return (split, index) if task.task_id == f"{split}-{index}" and isinstance(index, int) else None


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# -- to the worker --


class Open(_Message, frozen=True):
    """Build this environment. The first message to a worker."""

    env_id: str
    args: dict[str, Any]
    name: str
    hang_timeout_s: float
    models: tuple[str, ...] = ()  # names of the frozen models that it may ask
    directory: str | None = None  # `RunInfo.directory`


class StartCall(_Message, frozen=True):
    """Play one episode, build the prompt of a single-turn task, or score a reply to one."""

    call: int
    method: Literal["rollout", "prompt", "score"]
    task: Task  # its data is split and index; the worker makes the environment's own task from them
    text: str = ""  # the reply to score
    episode: EpisodeInfo | None = None  # of a rollout


class CancelCall(_Message, frozen=True):
    """Cancel this call; the worker still ends it, with `CallFailed`."""

    call: int


class TurnReply(_Message, frozen=True):
    """The reply to a `TurnRequest`."""

    turn: int
    reply: Reply


class ModelAnswer(_Message, frozen=True):
    """The reply to a `ModelRequest`."""

    turn: int
    reply: ModelReply


class TurnFailed(_Message, frozen=True):
    """The error that a `TurnRequest` or `ModelRequest` ended with, to be raised in the environment."""

    turn: int
    kind: str
    text: str


ToWorker = Open | StartCall | CancelCall | TurnReply | ModelAnswer | TurnFailed


# -- from the worker --


class Ready(_Message, frozen=True):
    """The environment is built."""

    is_single_turn: bool
    limits: EpisodeLimits
    num_tasks: dict[str, int | None]  # by split; None if endless
    no_tasks: dict[str, str]  # by split without tasks: the reason
    are_tasks_shared: bool  # evaluation uses the tasks of training
    ordered: list[str] = []  # splits whose tasks are drawn in order of index
    fingerprints: dict[str, int | None] = {}  # by split: checksum of the data behind the tasks


class OpenFailed(_Message, frozen=True):
    """The environment cannot be built."""

    kind: str
    text: str


class TurnRequest(_Message, frozen=True):
    """Request a turn of one agent: a reply to `messages`, or one that continues `prompt_ids`."""

    call: int
    turn: int
    agent: str | None
    is_trained: bool
    messages: list[Message] | None
    prompt_ids: np.ndarray | None
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    conversation: int = 0


class ModelRequest(_Message, frozen=True):
    """Ask a frozen model of the run; `turn` counts with those of TurnRequest."""

    call: int
    turn: int
    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    is_scored: bool = False  # for its score; the text of the answer is the number


class CallResult(_Message, frozen=True):
    """Ends a call of `rollout` or `score`."""

    call: int
    result: RolloutResult


class PromptResult(_Message, frozen=True):
    """Ends a call of `prompt`."""

    call: int
    messages: list[Message]


class CallFailed(_Message, frozen=True):
    """Ends any call with an error."""

    call: int
    kind: str
    text: str
    reason: str | None = None  # of records/outcomes.py


class Heartbeat(_Message, frozen=True):
    """The worker's event loop runs."""


FromWorker = Ready | OpenFailed | TurnRequest | ModelRequest | CallResult | PromptResult | CallFailed | Heartbeat


# -- errors --


def error_kind(error: StrettoError) -> str:
    """The name that stands for an error on the wire: its class, or the nearest known parent class."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), "EnvError")


def error_from(kind: str, text: str, reason: str | None = None) -> StrettoError:
    """The error that a name, a text and a reason from the wire stand for."""
    return _KINDS.get(kind, EnvError)(text, reason=reason)


# -- bytes --


async def receive(reader: asyncio.StreamReader, kind: Any) -> Any:
    """The next message; None if the other end has closed the wire.

    Raises: WireError, DataError if the bytes are no such message.
    """
    try:
        head = await reader.readexactly(BLOB_HEAD_BYTES)
        rest = await reader.readexactly(blob_bytes(head) - len(head))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decode_blob(head + rest, kind, where="environment worker")


def receive_blocking(sock: socket.socket, kind: Any) -> Any:
    """Like `receive`, but blocks on a socket that has a timeout.

    Raises: TimeoutError; WireError, DataError as `receive`.
    """
    head = _receive_exactly(sock, BLOB_HEAD_BYTES)
    rest = head and _receive_exactly(sock, blob_bytes(head) - len(head))
    return decode_blob(head + rest, kind, where="environment worker") if head and rest else None


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(size - len(data))
        except ConnectionError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)


def packed(message: Any) -> bytes:
    """A message as bytes.

    Raises: EnvError if a value in it cannot be sent.
    """
    try:
        return encode_blob(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as cause:
        raise EnvError(
            f"{_contents(message)} cannot be sent to another process: {cause}; use text, numbers, lists "
            "and dictionaries."
        ) from cause


def _contents(message: Any) -> str:
    """What a message of the wire contains, for errors."""
    names: dict[type, str] = {
        Open: "args",
        TurnRequest: "the request for a turn",
        ModelRequest: "the request to a model",
        CallResult: "the result",
        PromptResult: "the prompt",
    }
    return names.get(type(message), type(message).__name__)


def packed_checked(message: FromWorker) -> bytes:
    """A message with values of the environment, as bytes that the other end is sure to decode.

    Raises: EnvError if a value has the wrong type; the orchestrator would end a worker that sent it.
    """
    data = packed(message)
    try:
        decode_blob(data, FromWorker, where="message")  # type: ignore[arg-type]  # no type[T] takes a union
    except StrettoError as cause:
        raise EnvError(
            f"{_contents(message)} has a value of the wrong type: {cause}; messages and tools are "
            "lists of dictionaries, sampling is a dictionary with text as keys."
        ) from cause
    return data
