"""What a layer asks of attention: the function that a decoder is handed, and a layer's limits.

The trainer's is in models/attention.py, the engine's in inference/embedded/caches/kv_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Int

    from stretto.models.segments import SegmentTree

Attend = Callable[..., Tensor]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], limits) -> [tokens, heads, head_dim].

q and k are rotated by their positions already; scores are scaled by head_dim ** -0.5 and causal within a sequence.
limits: a `Limits`; layers without limits leave it out."""


@dataclass(frozen=True, eq=False)
class OwnTokens:
    """The tokens of a row that a rank has, and how it gets what all ranks have of theirs."""

    tokens: Int[np.ndarray, " own"]
    gather: Callable[[Float[Tensor, "own ..."]], Float[Tensor, "tokens ..."]]


class ChosenKeys(Protocol):
    """A layer's own choice of the tokens that a token attends to; an engine's cache for it is `Mixer.keys`."""

    def attend(
        self,
        q: Float[Tensor, "queries heads dim"],
        k: Float[Tensor, "keys one dim"],
        v: Float[Tensor, "keys one value_dim"],
        tree: SegmentTree,
        own: OwnTokens | None = None,
    ) -> Float[Tensor, "queries heads value_dim"]:
        """Attention to the chosen ones of the tokens that a row's segments see; own: of this rank's tokens."""
        ...


class Limits(NamedTuple):
    """The limits of a layer's attention besides the causal mask.

    window: how many tokens a token sees, itself included; None: all. sinks: a logit per head (parts/sinks.py). keys:
    which of these tokens it attends to; None: all of them. If keys are chosen, k has one head, and v is its first dims.
    """

    window: int | None
    sinks: Float[Tensor, " heads"] | None
    keys: ChosenKeys | None = None


NO_LIMITS = Limits(None, None)


class Heads(Protocol):
    """Ranks that have some of a row's tokens each, and swap heads for tokens."""

    @property
    def degree(self) -> int:
        """Ranks that share the heads."""
        ...

    def spread(self, x: Float[Tensor, "own channels"], parts: Sequence[int]) -> Float[Tensor, "tokens share"]:
        """All tokens with the channels of this rank's heads; parts: sizes of the channels' parts."""
        ...

    def collect(self, x: Float[Tensor, "tokens share dim"]) -> Float[Tensor, "own heads dim"]:
        """The reverse for the results of heads: this rank's tokens with all heads."""
        ...

    def own(self, weight: Float[Tensor, "channels ..."], parts: Sequence[int]) -> Float[Tensor, "share ..."]:
        """The rows of a weight for the channels of this rank's heads."""
        ...
