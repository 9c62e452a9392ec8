"""Load new weights into a running vLLM: our transports behind vLLM's own four routes.

    /init_weight_transfer_engine -> /start_weight_update -> /update_weights -> /finish_weight_update

`update_weights` receives a WeightManifest, which describes how to read the weights. Tensors have Hugging Face names
and shapes; vLLM's own loader splits, stacks and shards them for this worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from stretto.base.errors import ConfigError
from stretto.records.weight_manifest import AdapterInfo, WeightGroup, WeightManifest
from stretto.transports.weights import receive
from stretto.transports.weights.layout import NamedTensor, Receiver
from stretto_vllm.arrival import Arrival, num_gpus_of_host, reason_to_stop
from stretto_vllm.base import BaseWeights
from stretto_vllm.patches.loaders import keep_copied_weights
from stretto_vllm.patches.policy import policy
from stretto_vllm.worker import worker_index


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Empty: a manifest describes its transport, so nothing is set up before the first update."""


@dataclass
class ManifestInfo(WeightTransferUpdateInfo):
    """The body of one update: a WeightManifest and a WeightGroup, decoded from JSON."""

    manifest: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] | None = None


class StrettoWeights(WeightTransferEngine[NoInitInfo, ManifestInfo]):
    """The worker's side of every weight transport; vLLM calls its methods by these names."""

    init_info_cls = NoInitInfo
    update_info_cls = ManifestInfo
    _base: BaseWeights | None = None
    """For runs that train an adapter."""
    _is_replaced = False
    """Whether the model's weights differ from those of its directory."""
    _kernels: Mapping[Any, Any] = MappingProxyType({})
    """During an update on a CPU: kernels of the mixtures from before it and before earlier unfinished updates."""

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if policy.manager is not None:
            return  # the base model's weights stay as they are
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        _drop_unfinished_layers(self.model)
        if self.device.type == "cpu":
            self._kernels = {**self._kernels, **_forget_cpu_kernels(self.model)}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, but without synchronising an accelerator on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @cached_property
    def arrival(self) -> Arrival:
        return Arrival()

    def reason_to_stop(self, update_info: dict[str, Any]) -> str | None:
        """Why this worker cannot receive a version while steps go on; None if it can.

        Raises: ConfigError for a version that this engine does not load.
        """
        self.arrival.drop()
        manifest, group = _read(self.parse_update_info(update_info))
        self._check_kind(manifest.adapter)
        num_workers = max(1, min(num_gpus_of_host(), group.world_size)) if group is not None else 1
        return reason_to_stop(manifest, self.device, num_ranks=self._num_ranks, num_workers=num_workers)

    def begin(self, update_info: dict[str, Any]) -> None:
        """Start to receive a version while steps go on."""
        manifest, group = _read(self.parse_update_info(update_info))
        self.arrival.begin(lambda: self._receive(manifest, group))

    @property
    def _num_ranks(self) -> int:
        """Ranks that compute a step together; copies of a model without experts compute steps of their own."""
        copies = self.parallel_config.data_parallel_size if self.model_config.is_moe else 1
        return int(copies * self.parallel_config.world_size)

    def _receive(self, manifest: WeightManifest, group: WeightGroup | None) -> Receiver:
        return receive(manifest, group, worker_index(self.parallel_config), self.device)

    def receive_weights(self, update_info: ManifestInfo) -> None:
        """Load a version: what has arrived, else what is received now."""
        manifest, group = _read(update_info)
        self._check_kind(manifest.adapter)
        with self.arrival.take(manifest) or self._receive(manifest, group) as tensors:
            if policy.manager is not None:
                copies = [(name, tensor.to("cpu", copy=True)) for name, tensor in tensors]
                tensors.check_unchanged()
                self._store_policy(manifest.adapter, copies)
                return
            if manifest.adapter is None:
                self._mark_replaced()
            weights = tensors if manifest.adapter is None else self._merge_adapter(manifest.adapter, tensors)
            with keep_copied_weights(self.model):
                self.model.load_weights((name, tensor.to(self.device)) for name, tensor in weights)
            tensors.check_unchanged()

    def _check_kind(self, info: AdapterInfo | None) -> None:
        """Raises: ConfigError for what this engine does not load.

        One that computes the policy's adapter loads nothing else; named adapters come by /v1/load_lora_adapter.
        """
        if policy.manager is not None and (info is None or info.name is not None):
            raise ConfigError(
                "this engine computes the adapter of a run's policy beside its weights, and this weight update is no "
                "such adapter; set [model.lora] in the run, or start the engine without --policy-lora and without "
                "inference.lora.compute_policy = true"
            )
        if info is not None and info.name is not None:
            raise ConfigError(
                f"adapter {info.name!r} cannot be loaded as a weight update: vLLM loads named adapters from a "
                "directory; save it and call /v1/load_lora_adapter"
            )

    def _store_policy(self, info: AdapterInfo | None, tensors: Iterable[NamedTensor]) -> None:
        """Keep the policy's adapter for vLLM's own LoRA. Raises: DataError for one that vLLM cannot compute."""
        assert info is not None
        policy.store(tensors, info.rank, info.scaling, Path(self.model_config.model))

    def _merge_adapter(self, info: AdapterInfo, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Merge the policy's adapter into the weights with which vLLM was started."""
        if self._base is None:
            self._base = BaseWeights(Path(self.model_config.model))
            if self._is_replaced:
                self._base.mark_all_changed()
        return self._base.merge(tensors, info.rank, info.scaling, self.device)

    def _mark_replaced(self) -> None:
        """Note that the base model's weights are being replaced."""
        self._is_replaced = True
        if self._base is not None:
            self._base.mark_all_changed()

    def finish_weight_update(self) -> None:
        if policy.manager is not None:
            policy.forget_loaded()
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel  # the update had no weights for its experts
        self._kernels = {}
        if self.device.type == "cpu":
            _pack_cpu_heads(self.model)

    def shutdown(self) -> None:
        self.arrival.close()
        del self.arrival  # a later update has a new one
        if self._base is not None:
            self._base.close()
            self._base = None


def _read(info: ManifestInfo) -> tuple[WeightManifest, WeightGroup | None]:
    group = None if info.group is None else msgspec.convert(info.group, WeightGroup)
    return msgspec.convert(info.manifest, WeightManifest), group


def _drop_unfinished_layers(model: torch.nn.Module) -> None:
    """Restore the tensors that layers had before an update that was not finished.

    vLLM counts the weights that a layer has received. Without this it would count those of both updates, and use a
    layer before all of its new weights have arrived.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


def _forget_cpu_kernels(model: torch.nn.Module) -> dict[Any, Any]:
    """Remove the kernels of mixtures, so that a reload packs their experts again; returns them.

    On a CPU vLLM 0.32 packs the weights of experts once, when it builds their kernel, and then computes with the
    packed copy; a reload keeps an existing kernel, with the old weights (see vllm-project/vllm issue 48312).
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels: dict[Any, Any] = {}
    for method in methods:
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernels[method] = kernel
    for method in kernels:
        method.moe_kernel = None
    return kernels


def _pack_cpu_heads(model: torch.nn.Module) -> None:
    """Pack output matrices again after a reload, for those that are tied to the embedding.

    On a CPU vLLM 0.32 multiplies with a packed copy, which a reload updates only if the checkpoint has weights for the
    matrix itself.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
