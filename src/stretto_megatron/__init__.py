"""Checkpoints of Megatron, to and from Hugging Face's names; and networks of Megatron-Core, for the trainer."""

from __future__ import annotations

TYPE_CHECKING = False  # typing is not imported: a command should start fast
if TYPE_CHECKING:
    from typing import Any

    from stretto.trainer.network import Network

SUMMARIES = {
    "convert": "a checkpoint of Megatron as a Hugging Face directory, or the other way: stretto convert FROM TO"
}


def build_network(module: Any, **how: Any) -> Network:
    """A network that Megatron-Core computes; the arguments are those of `network.build_network`.

    Raises: ConfigError for a model, a device or an argument that Megatron does not take.
    """
    from stretto_megatron import network  # imports Megatron-Core, which takes seconds

    return network.build_network(module, **how)
