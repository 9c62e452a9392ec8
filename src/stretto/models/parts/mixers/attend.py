"""What a layer asks of attention: the function that a decoder is handed, and a layer's limits.

The trainer's is in models/attention.py, the engine's in inference/embedded/caches/kv_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from stretto.models.parts.mixers.key_choice import KeyChoice

if TYPE_CHECKING:
    from jaxtyping import Float

Attend = Callable[..., Tensor]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], limits) -> [tokens, heads, head_dim].

q and k are rotated by their positions already; scores are scaled by head_dim ** -0.5 and causal within a sequence.
limits: a `Limits`; layers without limits leave it out."""


class Limits(NamedTuple):
    """The limits of a layer's attention besides the causal mask.

    window: how many tokens a token sees, itself included; None: all. sinks: a logit per head (parts/sinks.py). keys:
    which of these tokens it attends to (parts/mixers/key_choice.py); None: all of them. If keys are chosen, k has one
    head, and v is its first dims.
    """

    window: int | None
    sinks: Float[Tensor, " heads"] | None
    keys: KeyChoice | None = None


NO_LIMITS = Limits(None, None)
