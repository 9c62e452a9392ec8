"""Weight loaders of vLLM 0.32 with which a reload fails, or by which it loses weights.

A reload replaces parameters by placeholders, whose loaders keep the new weights until a layer has all of them. It
compares the name of every loader with those of its own loaders, and minimax_m2 has loaders without a name. gpt_oss
copies its stacked experts and its sinks into the placeholders itself, so that the reload would restore the old ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

STACKED = ("w13_weight", "w2_weight", "w13_bias", "w2_bias", "sinks")
"""The last part of the names of the parameters that gpt_oss copies itself."""


def name_loaders() -> None:
    """Give every loader a name that a reload can compare."""
    from vllm.model_executor.model_loader.reload import layerwise

    find = layerwise._get_weight_loader

    @functools.wraps(find)
    def find_named(tensor: Any) -> Any:
        loader = find(tensor)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            loader.__name__ = "partial"  # type: ignore[attr-defined]  # it has a __dict__
        return loader

    layerwise._get_weight_loader = find_named


@contextmanager
def keep_copied_weights(model: torch.nn.Module) -> Iterator[None]:
    """A context in which a reload keeps weights that gpt_oss copies itself, after vLLM has cut them for this worker."""
    copying = [module for module in model.modules() if type(module).__name__ == "GptOssModel"]
    for module in copying:
        module.named_parameters = functools.partial(_with_receivers, module)  # type: ignore[method-assign]  # until the context ends
    try:
        yield
    finally:
        for module in copying:
            del module.named_parameters


class _Receiver:
    """Stands for a placeholder in the table of parameters from which gpt_oss loads; passes copies to the reload."""

    def __init__(self, param: Any, keep: Callable[[Any], None]) -> None:
        self.data, self.copy_ = self, keep
        self.weight_loader = param.weight_loader


def _with_receivers(module: torch.nn.Module, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    """The parameters of a module by name, with receivers for the placeholders of a reload."""
    for name, param in torch.nn.Module.named_parameters(module, *args, **options):
        path, _, last = name.rpartition(".")
        if param.is_meta and last in STACKED:
            yield name, _Receiver(param, functools.partial(_keep, module.get_submodule(path), last))
        else:
            yield name, param


def _keep(layer: torch.nn.Module, name: str, weight: torch.Tensor) -> None:
    """Give the reload the whole new value of a parameter."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    param = getattr(layer, name)
    if not param.is_meta:
        raise RuntimeError(f"{name} arrived a second time in one update")
    param.weight_loader = default_weight_loader
    layerwise.make_online_process_loader(layer, name)(param, weight)
