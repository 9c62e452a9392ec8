"""Server-sent events of the text routes: pieces of text as they are sampled, from one request or several."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from stretto.base.errors import StrettoError
from stretto.inference.text import Decode, Detokenizer
from stretto.transports.engine.api import Refusal

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StreamPiece:
    """The tokens that one step added to a streamed sample, or the sample's end."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_first: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class PieceDecoder:
    """Decodes one streamed sample; holds back what may be part of a stop string."""

    def __init__(self, decode: Decode, longest_stop: int) -> None:
        """longest_stop: characters of the longest stop string; 0: there is none."""
        self._detokenizer, self._longest_stop = Detokenizer(decode), longest_stop
        self._held = ""
        self.returned = ""
        self.has_begun = False

    def push(self, ids: list[int]) -> str:
        """The text that these tokens add, up to where a stop string may start."""
        self.has_begun = True
        added = [self._detokenizer.push(each) for each in ids]
        text = self._held + "".join(added)
        # The last token may have completed a stop string, which then starts in it or in the characters before it.
        num_held = len(added[-1]) + self._longest_stop - 1 if self._longest_stop else 0
        cut = max(len(text) - num_held, 0)
        piece, self._held = text[:cut], text[cut:]
        self.returned += piece
        return piece


async def merge_pieces(sources: list[AsyncGenerator[StreamPiece, None]]) -> AsyncGenerator[StreamPiece, None]:
    """Yield the items of all sources as they arrive; if one source fails, all end."""
    queue: asyncio.Queue[StreamPiece | None] = asyncio.Queue()

    async def drain(source: AsyncGenerator[StreamPiece, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    queue.put_nowait(item)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is not None:
                yield item
                continue
            num_open -= 1
            await asyncio.sleep(0)  # so that the task that has put None can end
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()


def finish_fields(piece: StreamPiece) -> dict[str, Any]:
    """The fields of a choice with the reason of its end; None before the end."""
    reasons: dict[str, Any] = {"logprobs": None, "finish_reason": piece.finish_reason}
    return reasons | ({"stop_reason": piece.stop_reason} if piece.finish_reason else {})


@asynccontextmanager
async def open_stream(http: web.Request) -> AsyncIterator[web.StreamResponse]:
    """A response of server-sent events; the status line is sent immediately, later errors are events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    try:
        try:
            yield response
        except ConnectionError:
            raise
        except Exception as error:  # the boundary of this request: see boundary.py
            if not isinstance(error, StrettoError):
                logger.exception("a stream of %s failed", http.path)
            status = error.status if isinstance(error, Refusal) else 500
            await response.write(b"data: " + Refusal(str(error), status).body() + b"\n\n")
            await response.write_eof()
    except ConnectionError:
        logger.debug("%s: the reader of a stream has disconnected", http.path)


async def end_stream(response: web.StreamResponse, last: dict[str, Any] | None) -> None:
    """Send a last event, if there is one, and end the stream."""
    if last is not None:
        await send_event(response, last)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()


async def send_event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    """Send one event."""
    await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
