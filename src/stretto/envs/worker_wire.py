"""What the orchestrator and an environment's worker process say to one another, and how.

One socket pair a worker; every message is one record in one blob (records/codec.py). The orchestrator says
`Open` once, then starts calls (`Play`, `Prompt`, `Score`), each of which the worker ends with exactly one of
`Done`, `Prompted` or `Failed`, also after `Cancel`. While a call runs, the worker may `Ask` for a turn of the
policy; each is answered by one `Answer` or `Refusal`. `Ready` or `Refused` answers `Open`; a `Beat` a second
says that the worker's event loop runs. The orchestrator's end is workers.py, the worker's is worker.py.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import numpy as np

from stretto.base import errors
from stretto.base.errors import EnvError, StrettoError, WireError
from stretto.envs.base import LimitReached, Limits, Message, OutOfContext, Reply, RolloutResult
from stretto.records.codec import BLOB_HEAD_BYTES, blob_bytes, decode_blob, encode_blob
from stretto.records.rollout import Task

BEAT_S = 1.0

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


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# -- to the worker --


class Open(_Message):
    """Build this environment."""

    env_id: str
    args: dict[str, Any]
    name: str
    hang_timeout_s: float


class Play(_Message):
    """Play one episode."""

    call: int
    task: Task  # its data names split and index; the worker makes the task itself


class Prompt(_Message):
    """The prompt of a task of one turn."""

    call: int
    task: Task


class Score(_Message):
    """The score of a reply to a task of one turn."""

    call: int
    task: Task
    text: str


class Cancel(_Message):
    """Give this call up; it is ended with `Failed` all the same."""

    call: int


class Answer(_Message):
    """The turn that was asked for."""

    ask: int
    reply: Reply


class Refusal(_Message):
    """There is no turn: an error to raise where it was asked for."""

    ask: int
    kind: str
    text: str


ToWorker = Open | Play | Prompt | Score | Cancel | Answer | Refusal


# -- from the worker --


class Ready(_Message):
    """The environment is built."""

    is_single_turn: bool
    limits: Limits
    num_tasks: dict[str, int | None]  # by split; None: no end of them
    no_tasks: dict[str, str]  # why there are none, by split
    are_tasks_shared: bool  # evaluation has the tasks of training
    ordered: list[str] = []  # splits whose tasks come in order of index
    fingerprints: dict[str, int | None] = {}  # of what tasks are made from, by split


class Refused(_Message):
    """It cannot be built."""

    kind: str
    text: str


class Ask(_Message):
    """A turn of one agent: `messages` to answer or `prompt_ids` to continue."""

    call: int
    ask: int
    agent: str | None
    is_trained: bool
    messages: list[Message] | None
    prompt_ids: np.ndarray | None
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]


class Done(_Message):
    """The end of a `Play` or `Score`."""

    call: int
    result: RolloutResult


class Prompted(_Message):
    """The end of a `Prompt`."""

    call: int
    messages: list[Message]


class Failed(_Message):
    """A call that ended with an error."""

    call: int
    kind: str
    text: str


class Beat(_Message):
    """The worker's event loop runs."""


FromWorker = Ready | Refused | Ask | Done | Prompted | Failed | Beat


# -- errors --


def kind_of(error: StrettoError) -> str:
    """The name an error crosses the wire with: its own, or that of the nearest known parent."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), "EnvError")


def error_of(kind: str, text: str) -> StrettoError:
    """The error that crossed the wire."""
    return _KINDS.get(kind, EnvError)(text)


# -- bytes --


async def receive(reader: asyncio.StreamReader, kind: Any) -> Any:
    """The next message; None at the end of the wire.

    Raises: WireError, DataError for anything else than a message.
    """
    try:
        head = await reader.readexactly(BLOB_HEAD_BYTES)
        rest = await reader.readexactly(blob_bytes(head) - len(head))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decode_blob(head + rest, kind, where="environment worker")


def receive_blocking(sock: socket.socket, kind: Any) -> Any:
    """As `receive`, on a socket with a timeout of its own; None at the end of the wire.

    Raises: TimeoutError.
    """
    head = _exactly(sock, BLOB_HEAD_BYTES)
    rest = head and _exactly(sock, blob_bytes(head) - len(head))
    return decode_blob(head + rest, kind, where="environment worker") if head and rest else None


def _exactly(sock: socket.socket, size: int) -> bytes | None:
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

    Raises: EnvError when it holds what cannot be sent.
    """
    try:
        return encode_blob(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as cause:
        raise EnvError(
            f"{type(message).__name__.lower()} cannot cross to another process: {cause}; use text, numbers, lists "
            "and dictionaries."
        ) from cause
