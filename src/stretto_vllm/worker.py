"""Methods that vLLM mixes into its worker class, and the numbering of workers.

An engine over several nodes has an HTTP server on each node, and every server counts only its own workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto_vllm.patches import leases


def num_workers(parallel: Any) -> int:
    """The number of workers behind one HTTP server. parallel: vLLM's ParallelConfig."""
    ranks = parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
    return ranks * parallel.world_size


def worker_index(parallel: Any) -> int:
    """This worker's number among those behind its HTTP server, from 0."""
    rank = parallel.data_parallel_rank_local if parallel.local_engines_only else parallel.data_parallel_index
    return (rank or 0) * parallel.world_size + parallel.rank


class WorkerExtension:
    """Methods that routes.py calls by collective_rpc, under these names."""

    _weight_update_active: bool  # vLLM's
    weight_transfer_engine: Any  # vLLM's; a StrettoWeights
    start_weight_update: Callable[[], None]  # vLLM's
    update_weights: Callable[[dict[str, Any]], None]  # vLLM's
    finish_weight_update: Callable[[], None]  # vLLM's

    def stretto_is_alive(self) -> bool:
        """True; a worker that hangs or is dead does not answer."""
        return True

    def stretto_start_update(self) -> None:
        """vLLM's start_weight_update, also after an update that was not finished.

        vLLM itself requires that the earlier update is finished first, which would use incomplete weights.
        """
        leases.note_pause()
        self._weight_update_active = False
        self.start_weight_update()

    def stretto_reason_to_stop(self, update_info: dict[str, Any]) -> str | None:
        """Why this worker cannot receive a version while steps go on; None if it can.

        Raises: ConfigError for a version that this engine does not load.
        """
        reason: str | None = self.weight_transfer_engine.reason_to_stop(update_info)
        return reason

    def stretto_receive(self, update_info: dict[str, Any]) -> None:
        """Start to receive a version while steps go on."""
        self.weight_transfer_engine.begin(update_info)

    def stretto_has_arrived(self) -> bool:
        """Whether the version is here and verified, or cannot be received."""
        return bool(self.weight_transfer_engine.arrival.is_here)

    def stretto_check_arrival(self) -> None:
        """Raises: WireError if the version could not be received, or if its bytes have changed since."""
        self.weight_transfer_engine.arrival.check()

    def stretto_drop_arrival(self) -> None:
        """Give the version up."""
        self.weight_transfer_engine.arrival.drop()

    def stretto_load(self, update_info: dict[str, Any]) -> None:
        """A whole update while the engine is paused, with what has arrived."""
        self.stretto_start_update()
        self.update_weights(update_info)
        self.finish_weight_update()
