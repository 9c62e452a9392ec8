"""LoRA adapters in vLLM: workarounds for four bugs of 0.32, and checks of adapters before they are loaded.

* If adapters fill all slots, vLLM computes requests for the base model in the same batch with the adapter of the last
  slot. So command.py gives vLLM one slot more than adapters may be loaded, and `enforce_limits` limits their number,
  which vLLM's own routes do not.
* If the output head may have an adapter, log-probabilities of a prompt in a batch with several adapters end the
  engine. So command.py lists the layers that may have an adapter, without the head.
* On a CPU, a mixture of experts in an engine with adapters fails at its first request. If no adapter has weights for
  experts, `disable_expert_adapters` builds the experts as in an engine without adapters.
* A part of an adapter whose layer has another name in vLLM is left out without a word;
  `refuse_layers_without_adapters` refuses it.
"""

from __future__ import annotations

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
        """Also reset the prefix cache after a replacement: vLLM identifies an adapter's blocks by name and path."""
        before = self.lora_requests.get(request.lora_name)
        answer = await load(self, request, *args, **kwargs)
        if before is not None and isinstance(answer, str):
            await self.engine_client.reset_prefix_cache()
        return answer

    @functools.wraps(unload)
    async def unloaded(self: Any, request: Any) -> Any:
        """Also free the adapter's slot: vLLM's route only removes the name."""
        adapter = self.lora_requests.get(request.lora_name)
        answer = await unload(self, request)
        if adapter is not None and isinstance(answer, str):
            await self.engine_client.remove_lora(adapter.lora_int_id)
        return answer

    OpenAIServingModels._check_load_lora_adapter_request = checked
    OpenAIServingModels.load_lora_adapter = loaded
    OpenAIServingModels.unload_lora_adapter = unloaded


def _bad_request(message: str) -> Any:
    from vllm.entrypoints.serve import create_error_response

    return create_error_response(message=message, err_type="BadRequestError", status_code=HTTPStatus.BAD_REQUEST)
