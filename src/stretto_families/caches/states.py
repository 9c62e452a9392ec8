"""The states of recurrent layers, one per sequence and layer, beside the paged keys and values of the others.

The size of a state does not depend on the length of the sequence, so it belongs to the sequence's slot and not to
blocks. It is 0 before the first token, is changed in place by every pass, and is copied when the samples of a request
start from its prompt. A preempted sequence is computed again from its first token. New weights change no state, as they
change no cached key.

States of earlier tokens are not kept, so a prompt cannot continue from the beginning of another request: the prefix
cache is off for models with such layers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from stretto.inference.embedded.caches.kv_cache import free_memory
from stretto.models.decoder import Decoder
from stretto_families.mixers.carried import CarriedDocuments, CarriedRows, LayerStates
from stretto_families.mixers.gated_delta import GatedDelta
from stretto_families.mixers.mamba2 import Mamba2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jaxtyping import Int

logger = logging.getLogger(__name__)

_MIN_PLACES = 16
_FREE_PER_STATES = 6
"""Free memory divided by memory for states; to grow they need half as much again while they are copied."""


class StateCache:
    """The states of all slots; memory grows with the largest number of slots in use."""

    def __init__(self, model: Decoder, *, max_sequences: int, is_exact: bool) -> None:
        """max_sequences: the number of slots; the attribute is less if their states would not fit.

        is_exact: compute prompts token by token, so that a token has equal bits in every batch.
        """
        self.max_sequences = sequences_that_fit(model, max_sequences)
        weight = model.output_weight
        self.device, self.dtype, self.is_exact = weight.device, weight.dtype, is_exact
        self._mixers = recurrent_mixers(model)
        self._layers: dict[int, LayerStates] = {}
        self._num_places, self._most_places = 0, self.max_sequences + 1

    @property
    def num_bytes(self) -> int:
        """Memory allocated for states."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer.tensors)

    @torch.inference_mode()
    def documents(self, owners: Int[np.ndarray, " rows"], positions: Int[np.ndarray, " rows"]) -> CarriedDocuments:
        """The rows of a pass with the states of their slots; row i is token positions[i] of slot owners[i].

        The states of sequences that start in this pass are set to 0.
        """
        places = owners + 1  # padding, -1, has a state of its own
        self._reserve(int(places.max()) + 1)
        new = torch.from_numpy(np.unique(places[(positions == 0) | (places == 0)])).to(self.device)
        for tensor in self._tensors():
            tensor.index_fill_(0, new, 0)
        rows = CarriedRows(places, self.device, is_stepwise=self.is_exact)
        return CarriedDocuments(rows, self._layers)

    @torch.inference_mode()
    def copy(self, source: Int[np.ndarray, " slots"], target: Int[np.ndarray, " slots"]) -> None:
        """Copy the states of slots, for samples that start from one prompt."""
        self._reserve(int(target.max()) + 2)
        src, dst = (torch.from_numpy(slots + 1).to(self.device) for slots in (source, target))
        for tensor in self._tensors():
            tensor.index_copy_(0, dst, tensor.index_select(0, src))

    def _tensors(self) -> Iterable[torch.Tensor]:
        return (tensor for layer in self._layers.values() for tensor in layer.tensors)

    def _reserve(self, places: int) -> None:
        if places <= self._num_places:
            return
        self._num_places = min(max(places, 2 * self._num_places, _MIN_PLACES), self._most_places)
        for layer, mixer in self._mixers.items():
            grown = mixer.new_states(self._num_places, self.dtype, self.device)
            if (old := self._layers.get(layer)) is not None:
                for new, before in zip(grown.tensors, old.tensors):
                    new[: len(before)] = before
            self._layers[layer] = grown


def recurrent_mixers(model: Decoder) -> dict[int, GatedDelta | Mamba2]:
    """The mixers that keep a state, by layer."""
    return {block.layer: block.mixer for block in model.model.blocks if block.is_recurrent}


def bytes_per_sequence(model: Decoder) -> int:
    """Bytes for the states of one sequence."""
    mixers = recurrent_mixers(model).values()
    states = (mixer.new_states(1, model.output_weight.dtype, torch.device("meta")) for mixer in mixers)
    return sum(tensor.nbytes for layer in states for tensor in layer.tensors)


def sequences_that_fit(model: Decoder, most: int) -> int:
    """The number of sequences that may run at one time: `most`, or fewer if their states do not fit."""
    per_sequence, device = bytes_per_sequence(model), model.output_weight.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    fit = max(free // _FREE_PER_STATES // per_sequence, 1)
    if fit < most:
        logger.warning(
            "max_num_seqs = %d would need %d bytes for the states of sequences; %d run at one time",
            most, most * per_sequence, fit,
        )  # fmt: skip
    return min(most, fit)
