"""LoRA adapters in vLLM: workarounds for bugs of 0.32, and checks of adapters before they are loaded.

* If adapters fill all slots, vLLM computes requests for the base model in the same batch with the adapter of the last
  slot. So command.py gives vLLM one slot more than adapters may be loaded, and `enforce_limits` limits their number,
  which vLLM's own routes do not. Running requests of unloaded adapters need slots too: `schedule_as_many_as_loaded`
  limits the adapters of a batch, and `keep_last_slot_empty` those in slots.
* vLLM reads an adapter from its files again if it has forgotten it, as after each weight update, and ends if they are
  gone. `keep_adapters_in_updates` has it forget none then, and `enforce_limits` none that has running requests.
* If the output head may have an adapter, log-probabilities of a prompt in a batch with several adapters end the
  engine. So command.py lists the layers that may have an adapter, without the head.
* On a CPU, a mixture of experts in an engine with adapters fails at its first request. If no adapter has weights for
  experts, `disable_expert_adapters` builds the experts as in an engine without adapters.
* A part of an adapter whose layer has another name in vLLM is left out without a word;
  `refuse_layers_without_adapters` refuses it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, DataError
from stretto.inference.limits import too_many_adapters
from stretto.models.lora import Adapter, load_adapter
from stretto_vllm.base import adaptable_weights
from stretto_vllm.patches.wrap import run_after


def disable_expert_adapters() -> None:
    """Build experts without adapters; called in every vLLM process, before the model is built."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    run_after(FusedMoEConfig, "__post_init__", lambda config: setattr(config, "is_lora_enabled", False))


def keep_adapters_in_updates() -> None:
    """Keep loaded adapters during weight updates, which change none; called in every vLLM process."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    LoRAModelRunnerMixin.reset_lora_state = lambda self: None  # what else it resets are adapters of the output head


def schedule_as_many_as_loaded() -> None:
    """Let adapters with names in a batch be one less than slots; called in every vLLM process.

    Requests for further ones wait: adapters may be unloaded, and others loaded, while their requests are running.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def limit(scheduler: Any) -> None:
        scheduler.lora_config = copy.copy(scheduler.lora_config)
        scheduler.lora_config.max_loras -= 1

    run_after(Scheduler, "__init__", limit)


def keep_last_slot_empty() -> None:
    """Let no adapter take the last slot, with which vLLM computes the base model; called in every vLLM process."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    add = LRUCacheWorkerLoRAManager.add_adapter

    @functools.wraps(add)
    def added(self: Any, request: Any) -> Any:
        manager = self._adapter_manager
        active = manager._active_adapters
        is_warm_up = self._cached_dummy_lora is not False  # its adapters are zero, and fill all slots
        if not is_warm_up and request.lora_int_id not in active and len(active) >= manager.lora_slots - 1:
            active.remove_oldest()
        return add(self, request)

    LRUCacheWorkerLoRAManager.add_adapter = added


@dataclass(frozen=True)
class AdapterLimits:
    """Limits of adapters, as set when the engine was started."""

    max_loras: int  # loaded at one time
    max_rank: int
    targets: tuple[str, ...]  # layers that may have an adapter
    directory: Path  # of the model

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Shapes of the weights that may have an adapter; None for families that only vLLM knows."""
        try:
            return adaptable_weights(self.directory).shapes
        except (DataError, ConfigError):
            return None

    def refusal_reason(self, path: str) -> str | None:
        """Why the adapter at `path` must not be loaded; None if it may.

        vLLM itself only warns about weights for which it has no layer, and ignores them.
        """
        try:
            adapter = load_adapter(path)
            if self.shapes is not None:
                adapter.check(self.shapes, path)
        except DataError as error:
            return f"lora_path: {error}"
        if adapter.rank > self.max_rank:
            return f"lora_path: its rank is {adapter.rank}, and inference.lora.max_lora_rank allows {self.max_rank}"
        reason = refusal_of_layers(adapter, self.targets)
        return None if reason is None else f"lora_path: {reason}"


def refusal_of_layers(adapter: Adapter, targets: Sequence[str]) -> str | None:
    """Why an engine whose adapters may have these layers cannot have this one; None if it can."""
    for name in adapter.pairs:
        layer = "experts" if ".experts." in name else name.removesuffix(".weight").rpartition(".")[2]
        if layer not in targets:
            return (
                f"it has weights for {layer}, and this engine serves adapters of {', '.join(targets)} only "
                "(inference.lora.target_modules)"
            )
    return None


def refuse_layers_without_adapters() -> None:
    """Refuse adapters with a part for which the model has no layer; called in every vLLM process.

    vLLM itself looks at the last words of names only, and computes the other parts.
    """
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    load = LRUCacheWorkerLoRAManager._load_adapter

    @functools.wraps(load)
    def loaded(self: Any, request: Any) -> Any:
        found = load(self, request)
        if missing := _without_layers(self._adapter_manager, found.loras):
            raise ValueError(f"this vLLM has no layer that can be adapted for {', '.join(missing[:3])}")
        return found

    LRUCacheWorkerLoRAManager._load_adapter = loaded


def _without_layers(manager: Any, names: Iterable[str]) -> list[str]:
    """The names of matrices for which vLLM's model has no layer, on the stage of this worker."""
    from vllm.model_executor.models.utils import PPMissingLayer

    known = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    modules = manager.model.named_modules()
    elsewhere = tuple(f"{name}." for name, module in modules if isinstance(module, PPMissingLayer))
    return [name for name in names if name.removesuffix(".base_layer") not in known and not name.startswith(elsewhere)]


def enforce_limits(limits: AdapterLimits) -> None:
    """Make vLLM's routes check adapters before they load them; called once, in the HTTP process."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    unloaded_ids: set[int] = set()  # of adapters that have running requests
    check = OpenAIServingModels._check_load_lora_adapter_request
    load, unload = OpenAIServingModels.load_lora_adapter, OpenAIServingModels.unload_lora_adapter

    @functools.wraps(check)
    async def checked(self: Any, request: Any) -> Any:
        if (error := await check(self, request)) is not None:
            return error
        reason = limits.refusal_reason(request.lora_path)
        request.is_3d_lora_weight = True  # how PEFT's files and ours have experts; it changes nothing without experts
        is_full = len(self.lora_requests) >= limits.max_loras
        if reason is None and is_full and request.lora_name not in self.lora_requests:
            reason = too_many_adapters(limits.max_loras)
        return None if reason is None else _bad_request(reason)

    @functools.wraps(load)
    async def loaded(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Also free the slots of unloaded adapters; caches.py keeps apart what a name's earlier ones have cached."""
        await _remove_unused(self.engine_client, unloaded_ids)
        answer = await load(self, request, *args, **kwargs)
        if isinstance(answer, str):
            self.lora_requests[request.lora_name].load_inplace = False  # else each step reads the files again
        return answer

    @functools.wraps(unload)
    async def unloaded(self: Any, request: Any) -> Any:
        """Also free the adapter's slot, once it has no running requests: vLLM's route only removes the name."""
        adapter = self.lora_requests.get(request.lora_name)
        answer = await unload(self, request)
        if adapter is not None and isinstance(answer, str):
            unloaded_ids.add(adapter.lora_int_id)
            await _remove_unused(self.engine_client, unloaded_ids)
        return answer

    OpenAIServingModels._check_load_lora_adapter_request = checked
    OpenAIServingModels.load_lora_adapter = loaded
    OpenAIServingModels.unload_lora_adapter = unloaded


async def _remove_unused(client: Any, unloaded_ids: set[int]) -> None:
    """Free what unloaded adapters without running requests take."""
    states = client.output_processor.request_states.values()
    used = {state.lora_request.lora_int_id for state in states if state.lora_request is not None}
    for number in unloaded_ids - used:
        unloaded_ids.discard(number)
        await client.remove_lora(number)


def _bad_request(message: str) -> Any:
    from vllm.entrypoints.serve import create_error_response

    return create_error_response(message=message, err_type="BadRequestError", status_code=HTTPStatus.BAD_REQUEST)
