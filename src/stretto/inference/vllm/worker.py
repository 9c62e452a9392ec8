"""What a vLLM worker can do besides: named with --worker-extension-cls and mixed into vLLM's worker class."""

from __future__ import annotations


class WorkerExtension:
    """Methods that routes.py calls by collective_rpc."""

    def stretto_is_alive(self) -> bool:
        """Answered by the worker itself, so that a hung or dead one does not answer."""
        return True
