"""The order of calls in a weight update: no token is computed with a mix of old and new weights.

    SERVING <-> PAUSED              /pause, /resume
    PAUSED  -> STARTED              /start_weight_update: from here on the engine may hold no complete version
    STARTED -> LOADED               /update_weights; STARTED if it fails
    LOADED  -> PAUSED               /finish_weight_update

/start_weight_update starts a new update in STARTED and LOADED too, because the caller of the earlier one may have died.

Both engines (server.py and vllm/guard.py) refuse other moves with 409 and the same messages. Requests that arrive
during an update wait, as in any pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal


class UpdateState(StrEnum):
    SERVING = "serving"
    PAUSED = "paused"
    STARTED = "started"
    LOADED = "loaded"


_NOT_PAUSED = "the engine is running; call /pause first (mode=keep keeps its requests)"
_NOT_LOADED = "no weights were loaded since /start_weight_update; send them to /update_weights first"
_REFUSED = {
    (api.START_UPDATE, UpdateState.SERVING): _NOT_PAUSED,
    (api.FINISH_UPDATE, UpdateState.STARTED): _NOT_LOADED,
    (api.RESUME, UpdateState.STARTED): f"a weight update has started, and {_NOT_LOADED}",
    (api.RESUME, UpdateState.LOADED): "a weight update is not finished; call /finish_weight_update first",
}
_IN_UPDATE = (UpdateState.STARTED, UpdateState.LOADED)


class UpdateOrder:
    """The state of one engine's weight update."""

    def __init__(self) -> None:
        self.state = UpdateState.SERVING
        self._num_resumed = 0

    @contextmanager
    def call(self, path: str) -> Iterator[None]:
        """Wrap a call of any route; an exception in the block means that the call failed.

        Raises: Refusal 409 if the call is out of order.
        """
        if (reason := _REFUSED.get((path, self.state))) is not None:
            raise Refusal(reason, 409)
        before, resumed = self.state, self._num_resumed
        if path == api.RESUME:
            self.state, self._num_resumed = UpdateState.SERVING, resumed + 1
        elif path == api.START_UPDATE or (path == api.UPDATE_WEIGHTS and before in _IN_UPDATE):
            self.state = UpdateState.STARTED
        try:
            yield
        except BaseException:
            if path == api.START_UPDATE:
                self.state = before
            raise
        if path == api.PAUSE and before is UpdateState.SERVING and self._num_resumed == resumed:
            self.state = UpdateState.PAUSED
        elif path == api.UPDATE_WEIGHTS and before in _IN_UPDATE:
            self.state = UpdateState.LOADED
        elif path == api.FINISH_UPDATE and before is UpdateState.LOADED:
            self.state = UpdateState.PAUSED
