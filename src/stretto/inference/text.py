"""Decoding of tokens to whole characters while they are sampled, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.records.generate import GenerateRequest

Decode = Callable[[Sequence[int]], str]

_NUM_BEFORE = 4  # tokens of the prompt that the text of the first sampled token may depend on
_MAX_HELD = 8  # tokens that may wait for the rest of a character; then they are decoded without it


class Detokenizer:
    """Decodes token by token; bytes of an unfinished character wait for the rest."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """before: tokens that precede the first one; their text is not returned."""
        self._decode = decode
        self._ids: list[int] = list(before)
        self._start = 0  # decoding starts one piece earlier: the text of a token depends on the token before
        self._num_decoded = len(self._ids)  # tokens whose text has been returned

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

    def __init__(
        self, stops: Sequence[str], decode: Decode, *, min_tokens: int = 0, before: Sequence[int] = ()
    ) -> None:
        """min_tokens: stop strings that these first tokens complete do not count. before: end of the prompt."""
        self._stops = stops
        self._tail_length = max(map(len, stops)) - 1
        self._detokenizer = Detokenizer(decode, before)
        self._tail = ""
        self._num_ignored = min_tokens

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes (the one that ends first in the text), if any."""
        known = len(self._tail)
        text = self._tail + self._detokenizer.push(token_id)
        self._tail = text[max(len(text) - self._tail_length, 0) :]
        if self._num_ignored > 0:
            self._num_ignored -= 1
            return None
        # A stop string must end in the new text: one that ends before was completed by an ignored token.
        found = ((text.find(stop, max(known + 1 - len(stop), 0)), stop) for stop in self._stops)
        ends = [(at + len(stop), number) for number, (at, stop) in enumerate(found) if at >= 0]
        return self._stops[min(ends)[1]] if ends else None


class TokenWatcher:
    """Reads a request's tokens in the step that samples them, for stop strings and for streams."""

    def __init__(self, spec: GenerateRequest, decode: Decode | None, *, is_streamed: bool) -> None:
        """decode: for the stop strings of the request."""
        params = spec.sampling
        before = spec.prompt_ids[-_NUM_BEFORE:].tolist()
        self._searches = None
        if params.stop and decode is not None:
            self._searches = [
                StopSearch(params.stop, decode, min_tokens=params.min_tokens, before=before) for _ in range(spec.n)
            ]
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


def cut_at_stop(text: str, stop_reason: int | str | None, *, min_tokens: int = 0) -> str:
    """A completion's text without the stop string that ended it: the first, or the last if some may not count."""
    if not isinstance(stop_reason, str) or stop_reason not in text:
        return text
    return text[: text.rfind(stop_reason) if min_tokens else text.find(stop_reason)]
