"""The run's own adapter in vLLM's LoRA kernels, beside the weights instead of merged into them.

Every request that names no adapter gets the policy's. `NewRequestData` carries it to the workers, so both of vLLM's
model runners, and their graphs, count it like an adapter that a request names. Prefixes in the cache are those of the
base model, as with other weight updates.

A worker stores the adapter of an update in a temporary directory, which vLLM loads as it loads named adapters. After an
update vLLM forgets the policy's adapter alone, and has the new one before its next step. Before the first update it is
zero, and requests get the base model.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.base.errors import ConfigError, DataError
from stretto.config.sections.model import LoRASection
from stretto.models.hf import find_adaptable_layers
from stretto.models.lora import Adapter, save_adapter
from stretto_vllm.base import adaptable_weights, names_in_files
from stretto_vllm.patches.adapters import refusal_of_layers

if TYPE_CHECKING:
    from stretto.transports.weights.layout import NamedTensor

POLICY_ID = 2**30
"""vLLM's number of the policy's adapter; it counts those of named adapters from 1."""


class PolicyAdapter:
    """This worker's copy of the policy's adapter. `manager` is vLLM's, None in engines that merge the adapter."""

    def __init__(self) -> None:
        self.manager: Any = None
        self._directory: Path | None = None
        self._ready: Any = None

    @property
    def directory(self) -> Path | None:
        """Where the adapter of the last update is, in PEFT's format; None before the first update."""
        return self._directory

    def store(self, tensors: Iterable[NamedTensor], rank: int, scaling: float, model: Path) -> None:
        """Replace the adapter by one with PEFT's names.

        Raises: DataError if vLLM cannot compute it; the one before then stays, as after any other error.
        """
        adapter = self._named_as_in_files(Adapter.from_tensors(tensors, rank, scaling), model)
        new = Path(tempfile.mkdtemp(prefix="stretto-policy-"))  # the engine's keeper removes what is in TMPDIR
        before, self._directory, self._ready = self._directory, new, None
        try:
            save_adapter(adapter, new, LoRASection(rank=rank, alpha=scaling * rank))
            config = self.manager.lora_config
            if (reason := refusal_of_layers(adapter, tuple(config.target_modules or ()))) is not None:
                raise ValueError(reason)
            self._ready = self.manager._load_adapter(policy_request())
        except BaseException as error:
            self._directory = before
            shutil.rmtree(new, ignore_errors=True)
            if not isinstance(error, ValueError):
                raise
            raise DataError(
                f"vLLM cannot compute the run's adapter: {error}; start this engine with the rank and target_modules "
                "of the run's [model.lora] (--policy-lora.rank, ...), or with inference.lora.compute_policy = false, "
                "which merges the adapter"
            ) from error
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def forget_loaded(self) -> None:
        """Have vLLM load the adapter of the last update before its next step, instead of the one that it has."""
        self.manager.remove_adapter(POLICY_ID)

    def take(self) -> Any:
        """The adapter as the update has loaded it, once: vLLM changes it when it is used."""
        ready, self._ready = self._ready, None
        return ready

    def _named_as_in_files(self, adapter: Adapter, model: Path) -> Adapter:
        """The adapter with the names of the model's files, which are those that vLLM has layers for.

        Raises: DataError if it does not fit the model.
        """
        try:
            table = adaptable_weights(model)
        except (DataError, ConfigError):  # a family that only vLLM knows
            return adapter
        if not adapter.pairs.keys() <= table.shapes.keys():
            table = find_adaptable_layers(model)  # of a policy that transformers computes (impl = "hf")
        adapter.check(table.shapes, str(model))
        names = names_in_files(table)
        pairs = {names.get(name, name): pair for name, pair in adapter.pairs.items()}
        return Adapter(pairs, adapter.rank, adapter.scaling)

    def close(self) -> None:
        """Remove the adapter's directory."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


policy = PolicyAdapter()


def policy_request() -> Any:
    """The policy's adapter as vLLM's requests name it; each worker knows the directory itself."""
    from vllm.lora.request import LoRARequest

    # Its experts, if it adapts any, are stacked; see command.py.
    return LoRARequest("stretto-policy", POLICY_ID, str(policy.directory or "policy"), is_3d_lora_weight=True)


def compute_policy_adapter() -> None:
    """Give requests without an adapter the policy's; called in every vLLM process."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.core.sched.output import NewRequestData

    from_request = NewRequestData.from_request.__func__
    load, create = LRUCacheWorkerLoRAManager._load_adapter, LRUCacheWorkerLoRAManager.create_lora_manager

    @functools.wraps(from_request)
    def with_policy(cls: type, *args: Any, **kwargs: Any) -> Any:
        data = from_request(cls, *args, **kwargs)
        if data.lora_request is None:
            data.lora_request = policy_request()
        return data

    @functools.wraps(load)
    def loaded(self: Any, request: Any) -> Any:
        if request.lora_int_id != POLICY_ID:
            return load(self, request)
        if policy.directory is None:  # zeros, which vLLM makes for its warm-up
            rank = self.get_dummy_lora_warmup_rank(8)
            return self._adapter_manager.create_dummy_lora(POLICY_ID, rank, self.embedding_modules)
        ready = policy.take()
        return load(self, policy_request()) if ready is None else ready

    @functools.wraps(create)
    def created(self: Any, *args: Any, **kwargs: Any) -> Any:
        policy.manager = self
        return create(self, *args, **kwargs)

    NewRequestData.from_request = classmethod(with_policy)
    LRUCacheWorkerLoRAManager._load_adapter = loaded
    LRUCacheWorkerLoRAManager.create_lora_manager = created
    atexit.register(policy.close)
