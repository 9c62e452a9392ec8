"""LoRA adapters in vLLM: three faults of 0.32 kept out of the way, and what vLLM would do wrong is refused.

Requests of the base model that share a batch with adapters in all slots are computed with the adapter of the last
slot: command.py gives vLLM one slot more than adapters may be loaded, and `guard` holds to that number, which
vLLM's own routes do not. Log-probabilities of a prompt in a batch with several adapters end the engine, where an
adapter may stand beside the output head: command.py names the layers that may have one, and the head is not among
them. A mixture of experts in an engine with adapters fails at its first request on a CPU: where adapters leave the
experts alone, `leave_experts_alone` builds them as in an engine without.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

from stretto.base.errors import DataError
from stretto.models.hub import load_config, table_of
from stretto.models.lora import load_adapter


def leave_experts_alone() -> None:
    """Mixtures are computed as without adapters; in every vLLM process, before the model is built."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    if getattr(FusedMoEConfig, "_stretto_adapters", False):
        return
    FusedMoEConfig._stretto_adapters = True
    original = FusedMoEConfig.__post_init__

    @functools.wraps(original)
    def without_adapters(self: Any) -> None:
        original(self)
        self.is_lora_enabled = False

    FusedMoEConfig.__post_init__ = without_adapters


@dataclass(frozen=True)
class Limits:
    """What an engine was started for: adapters at a time, their largest rank, layers that may have one, the model."""

    max_loras: int
    max_rank: int
    targets: tuple[str, ...]
    directory: Path

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Of the model's parameters; None for families that only vLLM knows."""
        try:
            return table_of(load_config(self.directory)).shapes
        except DataError:
            return None

    def refusal(self, path: str) -> str | None:
        """Why an adapter is not loaded: vLLM leaves out, with a warning, what it has no layer for."""
        try:
            adapter = load_adapter(path)
            if self.shapes is not None:
                adapter.check(self.shapes, path)
        except DataError as error:
            return f"lora_path: {error}"
        if adapter.rank > self.max_rank:
            return f"lora_path: its rank is {adapter.rank}, and inference.lora.max_lora_rank allows {self.max_rank}"
        for name in adapter.pairs:
            layer = "experts" if ".experts." in name else name.removesuffix(".weight").rpartition(".")[2]
            if layer not in self.targets:
                return (
                    f"lora_path: it adapts {layer}, and this engine serves adapters of {', '.join(self.targets)} "
                    "(inference.lora.target_modules)"
                )
        return None


def guard(limits: Limits) -> None:
    """Check what is loaded by vLLM's routes; once, in the process that serves HTTP."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    if getattr(OpenAIServingModels, "_stretto_adapters", False):
        return
    OpenAIServingModels._stretto_adapters = True
    check = OpenAIServingModels._check_load_lora_adapter_request
    load, unload = OpenAIServingModels.load_lora_adapter, OpenAIServingModels.unload_lora_adapter

    @functools.wraps(check)
    async def checked(self: Any, request: Any) -> Any:
        if (error := await check(self, request)) is not None:
            return error
        reason = limits.refusal(request.lora_path)
        is_full = len(self.lora_requests) >= limits.max_loras
        if reason is None and is_full and request.lora_name not in self.lora_requests:
            reason = (
                f"lora_name: {limits.max_loras} adapters are loaded, and inference.lora.max_loras allows no more; "
                "unload one"
            )
        return None if reason is None else _bad_request(reason)

    @functools.wraps(load)
    async def loaded(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM knows cached blocks by an adapter's name and path, which are those of the one that was replaced."""
        before = self.lora_requests.get(request.lora_name)
        answer = await load(self, request, *args, **kwargs)
        if before is not None and isinstance(answer, str):
            await self.engine_client.reset_prefix_cache()
        return answer

    @functools.wraps(unload)
    async def unloaded(self: Any, request: Any) -> Any:
        """vLLM forgets the name only; its slot must be free for the next."""
        held = self.lora_requests.get(request.lora_name)
        answer = await unload(self, request)
        if held is not None and isinstance(answer, str):
            await self.engine_client.remove_lora(held.lora_int_id)
        return answer

    OpenAIServingModels._check_load_lora_adapter_request = checked
    OpenAIServingModels.load_lora_adapter = loaded
    OpenAIServingModels.unload_lora_adapter = unloaded


def _bad_request(message: str) -> Any:
    from vllm.entrypoints.serve import create_error_response

    return create_error_response(
        message=message, err_type="BadRequestError", status_code=HTTPStatus.BAD_REQUEST
    )
