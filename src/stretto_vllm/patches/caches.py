"""Which weights vLLM's prefix cache names in its keys: of the policy by a salt, of a named adapter by its loads.

vLLM makes a request's keys when it comes. A request that still waits when weights are replaced is computed with the new
ones, so its keys are made anew then. Both ends of this are here: the server gives salts to requests
(updates.py), the engine changes those of requests that wait.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

OWN = "stretto weights"
"""How the salts of `policy_salt` begin."""
_LOAD = ", load "


def policy_salt(manifest: Mapping[str, Any]) -> str:
    """The salt of requests that have none, with the weights of this manifest."""
    probe = " of a probe" if manifest.get("is_probe") else ""
    return f"{OWN}{probe}, version {manifest['version']}, {manifest['checksum']:#010x}"


def with_policy(salt: str | None, policy: str) -> str | None:
    """A salt after an update of the policy: that of a caller stays."""
    given, mark, load = (salt or "").partition(_LOAD)
    return f"{policy}{mark}{load}" if not given or given.startswith(OWN) else salt


def with_load(salt: str | None, number: int, *, has_waited: bool = False) -> str:
    """A salt of a request for an adapter whose name has been loaded `number` times.

    has_waited: the engine has counted, which may have loaded adapters before its server did.
    """
    return f"{(salt or '').partition(_LOAD)[0]}{_LOAD}{number}{' of the engine' * has_waited}"


def follow_weights() -> None:
    """Give EngineCore `stretto_salt`, and let its requests that wait follow adapters; called in every vLLM process."""
    from vllm.v1.engine.core import EngineCore

    loads: Counter[str] = Counter()
    add = EngineCore.add_lora

    @functools.wraps(add)
    def added(self: Any, lora_request: Any) -> Any:
        answer = add(self, lora_request)
        loads[lora_request.lora_name] += 1
        for request in _waiting(self.scheduler):
            if request.lora_request is not None and request.lora_request.lora_name == lora_request.lora_name:
                _salt(request, with_load(request.cache_salt, loads[lora_request.lora_name], has_waited=True))
        return answer

    def stretto_salt(self: Any, policy: str) -> None:
        for request in _waiting(self.scheduler):
            _salt(request, with_policy(request.cache_salt, policy))

    EngineCore.add_lora, EngineCore.stretto_salt = added, stretto_salt


def _waiting(scheduler: Any) -> list[Any]:
    """Requests of which nothing has been computed."""
    from vllm.v1.request import RequestStatus

    early = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    return [each for each in scheduler.requests.values() if each.status in early and not each.num_computed_tokens]


def _salt(request: Any, salt: str | None) -> None:
    if salt != request.cache_salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
