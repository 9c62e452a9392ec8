"""The one tenant of a backbone that trains all its weights instead of an adapter.

Initial values, updates and saved state are those of a run without [model.lora]. When the tenant is removed, the
backbone gets the weights back with which it was loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.config.sections.model import LoRASection, ModelSection
from stretto.config.sections.trainer import Optim, Scheduler
from stretto.models.decoder import Decoder
from stretto.models.hf import Policy
from stretto.trainer.ranks.mesh import Mesh
from stretto_service.tenants.layers import AdaptableLayers
from stretto_service.tenants.tenant import Place, Tenant
from stretto_service.wires.operations import TenantSpec


class BaseWeights:
    """A copy of the weights with which a backbone was loaded, in host memory."""

    def __init__(self, policy: Policy, model: ModelSection) -> None:
        self.policy = policy
        is_frozen = model.vlm is None or model.vlm.freeze_vision_encoder
        if isinstance(policy, Decoder) and policy.config.vision is not None and is_frozen:
            policy.model.visual.requires_grad_(False)
        self._tensors: dict[str, Tensor] = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in policy.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def put_back(self) -> None:
        """Copy these weights into the backbone."""
        parameters = dict(self.policy.named_parameters())
        for name, tensor in self._tensors.items():
            parameters[name].copy_(tensor)


class FullTenant(Tenant):
    """A tenant whose weights are the backbone's."""

    def __init__(
        self,
        spec: TenantSpec,
        sections: tuple[LoRASection, Optim, Scheduler],
        base: BaseWeights,
        layers: AdaptableLayers,
        model: ModelSection,
        mesh: Mesh,
    ) -> None:
        self._base = base
        self._halves = {}
        super().__init__(spec, sections, layers, model, mesh)

    def _trained_module(self, model: ModelSection) -> nn.Module:
        return self._base.policy

    @property
    def scaling(self) -> None:
        """There is no adapter."""
        return None

    def remove(self) -> None:
        """Remove the tenant and restore the backbone."""
        self.weights.release()
        self._base.put_back()

    def move(self, place: Place, folder: object = None) -> None:
        """Do nothing: there is no other tenant that needs the memory."""
