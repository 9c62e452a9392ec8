"""New weights for a running vLLM: our transports behind vLLM's own four routes.

    /init_weight_transfer_engine -> /start_weight_update -> /update_weights -> /finish_weight_update

`update_weights` is given a WeightManifest; whoever published it says how it is read. Tensors have Hugging Face
names and shapes; vLLM's own loader splits, stacks and shards them for this worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from stretto.base.errors import ConfigError
from stretto.models.hub import load_config, read_tensors, table_of
from stretto.models.lora import Adapter, merge
from stretto.records.weights import AdapterInfo, WeightGroup, WeightManifest
from stretto.transports.weights import receive
from stretto.transports.weights.layout import Named


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Transports that are described by their manifests need no meeting before the first update."""


@dataclass
class ManifestInfo(WeightTransferUpdateInfo):
    """The body of one update: a WeightManifest as JSON has it."""

    manifest: dict[str, Any] = field(default_factory=dict)
    group: dict[str, Any] | None = None


class StrettoWeights(WeightTransferEngine[NoInitInfo, ManifestInfo]):
    """One worker's end of any weight transport."""

    init_info_cls = NoInitInfo
    update_info_cls = ManifestInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.device.type == "cpu":
            _forget_cpu_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class's, which synchronises an accelerator that a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ManifestInfo) -> None:
        manifest = msgspec.convert(update_info.manifest, WeightManifest)
        group = None if update_info.group is None else msgspec.convert(update_info.group, WeightGroup)
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        with receive(manifest, group, worker, self.device) as tensors:
            whole = tensors if manifest.adapter is None else self._merged(manifest.adapter, tensors)
            self.model.load_weights((name, tensor.to(self.device)) for name, tensor in whole)
            tensors.check_unchanged()

    def _merged(self, info: AdapterInfo, tensors: Iterable[Named]) -> Iterator[Named]:
        """The weights vLLM was started with, from their files, and the policy's adapter added to them.

        Raises: ConfigError for an adapter with a name of its own: vLLM loads those by /v1/load_lora_adapter.
        """
        if info.name is not None:
            raise ConfigError(
                f"adapter {info.name!r} cannot come as a weight update: vLLM serves adapters by name from a directory; "
                "save it there and call /v1/load_lora_adapter"
            )
        copies = ((name, tensor.to("cpu", copy=True)) for name, tensor in tensors)
        adapter = Adapter.from_tensors(copies, info.rank, info.scaling)
        directory = Path(self.model_config.model)
        table = table_of(load_config(directory))
        adapter.check(table.shapes, str(directory))
        return merge(read_tensors(directory), table, adapter)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_cpu_heads(self.model)

    def shutdown(self) -> None:
        pass


def _forget_cpu_kernels(model: torch.nn.Module) -> None:
    """Mixtures pack their experts again when they are loaded again.

    On a CPU vLLM 0.32 packs the weights of the experts once, when their kernel is made, and then computes with
    the packed copy; a reload finds the kernel and leaves it (vllm-project/vllm issue 48312 is about reloads
    that go wrong like this).
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_cpu_heads(model: torch.nn.Module) -> None:
    """An output matrix that is tied to the embedding is packed again after a reload.

    On a CPU vLLM 0.32 multiplies with a packed copy, which a reload renews only where the matrix has weights of
    its own in the checkpoint.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
