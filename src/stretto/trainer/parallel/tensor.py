"""Tensor parallelism: cuts the layers of a family's plan by features over the axis tp.

The plan is data (families/family.py). A `column` layer takes the whole input and computes some of its output features;
a `row` layer takes some of the input features and computes a partial sum of the output. So a block needs two
all-reduces, after attention and after the MLP; or as many exchanges of tokens (sequence.py). The embedding and the
output head (`vocab`) are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stretto.models.fp8.reference import product
from stretto.models.lora import LoRALinear
from stretto.trainer.parallel.collectives import all_reduce, sum_gradients
from stretto.trainer.ranks.mesh import Mesh


def cut_layers(policy: nn.Module, plan: Mapping[str, str], mesh: Mesh) -> tuple[dict[str, int], set[str], set[str]]:
    """Keep this rank's features of every layer of the plan.

    If ranks of tp split tokens, row layers return partial sums, and sequence.py gathers and adds.

    Returns: the dim along which each parameter is cut; the parameters that are whole but are applied to this rank's
    features only, so that their gradients must be summed over tp; the modules whose layers are cut.
    """
    cuts: dict[str, int] = {}
    parents: set[str] = set()
    modules = dict(policy.named_modules())
    for name, module in modules.items():
        how = plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name))
        if how not in ("column", "row") or not isinstance(module, nn.Linear):
            continue
        if how == "column":
            parents.add(name.rpartition(".")[0])
            for key in ("weight", "bias", "lora_B"):
                if getattr(module, key, None) is not None:
                    _keep_own_features(module, key, 0, mesh)
                    cuts[f"{name}.{key}"] = 0
        else:
            for key in ("weight", "lora_A"):
                if hasattr(module, key):
                    _keep_own_features(module, key, 1, mesh)
                    cuts[f"{name}.{key}"] = 1
            module.forward = _row_forward(module, mesh)  # type: ignore[method-assign]  # of this layer alone
        module.out_features, module.in_features = module.weight.shape
    for name in parents if not mesh.degrees.splits_tokens else ():
        modules[name].register_forward_pre_hook(_sum_input_gradients(mesh.tp_group))
    partial = {
        path
        for path, _ in policy.named_parameters()
        if path not in cuts
        and (owner := path.rpartition(".")[0]).rpartition(".")[0] in parents
        and (not isinstance(modules[owner], nn.Linear) or _is_uncut_half(path, owner, cuts))
    }
    return cuts, partial, parents


def _is_uncut_half(path: str, owner: str, cuts: Mapping[str, int]) -> bool:
    """True for an adapter matrix that stays whole because its layer is cut on the other side."""
    return path.endswith(("lora_A", "lora_B")) and f"{owner}.weight" in cuts


def _keep_own_features(module: nn.Module, name: str, dim: int, mesh: Mesh) -> None:
    parameter = getattr(module, name)
    part = parameter.detach().chunk(mesh.degrees.tp, dim=dim)[mesh.tp_rank].clone()
    setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _sum_input_gradients(group: Any) -> Any:
    """A forward pre-hook that sums the gradient of the module's input over tp."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return sum_gradients(args[0], group), *args[1:]

    return hook


def _row_forward(module: nn.Linear, mesh: Mesh) -> Any:
    # Partial sums have the bias once: ranks that multiply it by 0 still give it a gradient, which all ranks add up.
    bias_share = float(mesh.tp_rank == 0)

    def forward(x: Tensor) -> Tensor:
        out = product(x, module)
        if isinstance(module, LoRALinear):
            out = out + module.adapted(x)
        if mesh.degrees.splits_tokens:
            return out if module.bias is None else out + bias_share * module.bias
        out = all_reduce(out, mesh.tp_group)
        return out if module.bias is None else out + module.bias

    return forward
