"""What says how much a text is worth, for advantages that need values; `[trainer.critic]` asks for one.

An add-on makes it (`addons.py`, stretto.valuers), and build.py asks once. The learner keeps its network's state with
its own, updates.py lets it estimate values and learn, and rl.py says when it saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from stretto.models.tensor_map import TensorSlice
from stretto.records.sample import MicroBatch
from stretto.trainer.network import Network
from stretto.trainer.state.learner_state import TensorInfo

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from jaxtyping import Float

    from stretto.config.root import TrainerConfig
    from stretto.config.sections.trainer import CriticSection

NAME: Literal["critic"] = "critic"
"""Its section in [trainer], its role among the processes, and what names in its state begin with."""


class Valuer:
    """Trained beside the policy, on its ranks or on others; all ranks make the same calls.

    What a class of it leaves out is not for it to do.
    """

    section: CriticSection
    network: Network | None
    """What is trained on these ranks; None if it has ranks of its own."""

    def connect(self) -> None:
        """Meet its own ranks; they load meanwhile."""

    def begin(self, step: int) -> None:
        """Wait until it is ready to go on after this step."""

    # -- a step --

    def start_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """A step has begun with this batch."""

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Float[np.ndarray, " _"]]:
        """Per micro batch, float32 [tokens]: the value before each rl token, 0 elsewhere."""
        raise NotImplementedError

    def start_updates(self, micro_batches: Sequence[MicroBatch], num_updates: int) -> None:
        """The batch has values and returns; an epoch has this many updates."""

    def train(self, part: Sequence[MicroBatch], step: int) -> None:
        """One update in step `step`, with some of the batch."""

    def pop_metrics(self) -> dict[str, float]:
        """Metrics of the updates since the last call."""
        raise NotImplementedError

    # -- files --

    def slices(self) -> dict[str, TensorSlice]:
        """This rank's slices of its state, for the learner's."""
        return {}

    def targets(self, saved: Mapping[str, TensorInfo]) -> dict[str, TensorSlice]:
        """The slices for its part of a learner's saved state.

        Raises: DataError when there is none, or it is of another model.
        """
        return {}

    def save(self) -> None:
        """A checkpoint is written after this step."""

    def has_saved(self, step: int) -> bool:
        """True if all its files of this step's checkpoint are written."""
        return True

    def flush(self) -> None:
        """Wait until all its files are written."""

    def export(self, cfg: TrainerConfig, step: int, tokenizer_dir: Path) -> None:
        """Write a model directory, and delete those that [ckpt] does not keep."""

    def end(self) -> None:
        """The run is over."""
