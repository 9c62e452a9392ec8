"""Decoding of tokens to whole characters while they are sampled, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_MAX_HELD = 8  # tokens that may wait for the rest of a character; then they are decoded without it


class Detokenizer:
    """Decodes token by token; bytes of an unfinished character wait for the rest."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # decoding starts one piece earlier: the text of a token depends on the token before
        self._num_decoded = 0  # tokens whose text has been returned

    def push(self, token_id: int) -> str:
        """The text that this token adds; empty while a character is unfinished."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._num_decoded])
        now = self._decode(self._ids[self._start :])
        if now.endswith("\ufffd") and len(self._ids) - self._num_decoded < _MAX_HELD:
            return ""
        self._start, self._num_decoded = self._num_decoded, len(self._ids)
        return now[len(before) :]


class StopSearch:
    """Finds the token that completes one of the stop strings."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._detokenizer = Detokenizer(decode)
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes (the earliest in the text), if any."""
        text = self._tail + self._detokenizer.push(token_id)
        matches = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        self._tail = text[max(len(text) - self._tail_length, 0) :]
        return min(matches)[1] if matches else None


class TokenWatcher:
    """Reads a request's tokens in the step that samples them, for stop strings and for streams."""

    def __init__(self, n: int, stops: Sequence[str], decode: Decode | None, *, is_streamed: bool) -> None:
        self._searches = [StopSearch(stops, decode) for _ in range(n)] if stops else None
        self._is_streamed = is_streamed
        self._events: list[tuple[int, int, float]] = []

    def observe(self, member: int, token_id: int, logprob: float) -> str | None:
        """Called by the engine for every token; returns the stop string that ends the sample, if any."""
        if self._is_streamed:
            self._events.append((member, token_id, logprob))
        return self._searches[member].push(token_id) if self._searches else None

    def pop_events(self) -> list[tuple[int, int, float]]:
        """Remove and return all (sample, token, logprob) since the last call."""
        events, self._events = self._events, []
        return events


def cut_at_stop(text: str, stop_reason: int | str | None) -> str:
    """A completion's text without the stop string that ended it."""
    return text[: text.find(stop_reason)] if isinstance(stop_reason, str) and stop_reason in text else text
