"""One frozen backbone and its tenants on one rank: executes the operations of wires/operations.py.

Every rank has the same tenants and executes the same operations in the same order, so that all ranks decide alike
(which tenant's memory is put away, whether a gradient is finite). What one rank alone can see, such as a file that
cannot be read, is exchanged before anything changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from stretto.base.errors import ConfigError, DataError, StrettoError, boundary
from stretto.check.checkpoint import SCHEMA
from stretto.config.sections.model import LoRASection, ModelSection
from stretto.models import hub
from stretto.models.hf import Policy
from stretto.models.lora import save_adapter
from stretto.records.weight_manifest import MANIFEST
from stretto.trainer.parallel.memory import prepare_blocks
from stretto.trainer.parallel.precision import apply_fp8
from stretto.trainer.parallel.shard import ShardedWeights, parallelise
from stretto.trainer.publish.export import new_directory
from stretto.trainer.ranks.mesh import Mesh
from stretto.trainer.state.checkpoint import SavedState, write_directory
from stretto.transports.weights.filesystem import describe_files
from stretto_service.tenants.checks import read_spec
from stretto_service.tenants.full import BaseWeights, FullTenant
from stretto_service.tenants.layers import AdaptableLayers, Turn, prepare_layers
from stretto_service.tenants.passes import Passes
from stretto_service.tenants.tenant import Tenant
from stretto_service.wires.operations import (
    CreateTenant,
    Done,
    DropGradients,
    ExportAdapter,
    LoadTenant,
    Operation,
    OptimStep,
    Pass,
    RemoveTenant,
    SaveTenant,
    Shutdown,
    TenantResult,
    TenantSpec,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ADVICE = "save the tenant again, or load an earlier state"
_DAMAGED = (StrettoError, OSError)
_OfOneTenant = OptimStep | DropGradients | SaveTenant | LoadTenant | ExportAdapter


class Tenants:
    """The tenants of a backbone, which is changed in place. All ranks must call `execute` alike."""

    def __init__(
        self,
        policy: Policy,
        *,
        model: ModelSection,
        mesh: Mesh | None = None,
        max_rank: int | None = None,
        max_resident: int | None = None,
        swap_folder: Path | None = None,
        trains_all: bool = False,
        tokenizer_dir: Path | None = None,
    ) -> None:
        """model: its `ep` is 1. max_rank: the largest rank of an adapter.

        max_resident: the most tenants whose tensors are on the device; None: all. swap_folder: where the others are
        kept if the device is the CPU; with a GPU they are kept in host memory. trains_all: there is one tenant at a
        time, which trains the backbone itself, on one rank. tokenizer_dir: with trains_all, exports get this tokenizer.
        """
        self.policy, self.model = policy, model
        self.mesh = mesh or Mesh.single_rank(policy.output_weight.device)
        apply_fp8(policy, model)
        self._base, self._tokenizer_dir = None, tokenizer_dir
        if trains_all:
            assert self.mesh.world_size == 1, "checked with the config"
            self._base, self._layers = BaseWeights(policy, model), AdaptableLayers(Turn())
            prepare_blocks(policy, model)
        else:
            self._layers = prepare_layers(policy)
            # A section with an adapter that drops inputs: blocks that are computed again then draw the same numbers.
            prepare_blocks(policy, model.model_copy(update={"lora": LoRASection(dropout=0.5)}))
        self._shards: ShardedWeights | None = None
        if self.mesh.world_size > 1:
            self._shards = parallelise(policy, self.mesh, model)
        reshard = (lambda: None) if self._shards is None else self._shards.reshard
        self._passes = Passes(policy, self._layers.turn, self.mesh, model, reshard)
        self._max_rank, self._max_resident = max_rank, max_resident
        self._swap_folder = swap_folder
        # The least recently used come first.
        self._tenants: dict[str, Tenant] = {}

    def execute(self, operation: Operation) -> Done:
        """Execute an operation and answer it.

        Raises: an error that is not one tenant's; the rank must end then.
        """
        results: dict[str, TenantResult] = {}
        match operation:
            case Pass():
                results = self._pass(operation)
            case Shutdown():
                pass
            case CreateTenant():
                results = {operation.spec.name: self._guarded(lambda: self._create(operation))}
            case RemoveTenant():
                results = {operation.tenant: self._remove(operation.tenant)}
            case _:
                results = {operation.tenant: self._guarded(lambda: self._for_tenant(operation))}
        return Done(number=operation.number, results=results)

    def __getitem__(self, name: str) -> Tenant:
        """Raises: DataError for a name that no tenant has."""
        if name not in self._tenants:
            raise DataError(f"the trainer has no tenant {name!r}")
        return self._tenants[name]

    # -- operations --

    def _guarded(self, function: Callable[[], TenantResult]) -> TenantResult:
        try:
            return function()
        except StrettoError as error:
            return TenantResult(error=str(error))

    def _for_tenant(self, operation: _OfOneTenant) -> TenantResult:
        tenant = self[operation.tenant]
        self._bring_back([tenant.spec.name])
        match operation:
            case OptimStep():
                return TenantResult(metrics=tenant.update(operation.adam))
            case DropGradients():
                tenant.drop_gradients()
                return TenantResult()
            case SaveTenant():
                return self._save(tenant, operation)
            case LoadTenant():
                return self._load(tenant, operation.path, with_optimizer=operation.with_optimizer)
            case ExportAdapter():
                return self._export(tenant, Path(operation.directory))
        raise AssertionError(f"not an operation of a tenant: {operation}")

    def _pass(self, operation: Pass) -> dict[str, TenantResult]:
        unknown = {
            work.tenant: TenantResult(error=f"the trainer has no tenant {work.tenant!r}")
            for work in operation.works
            if work.tenant not in self._tenants
        }
        works = tuple(work for work in operation.works if work.tenant in self._tenants)
        self._bring_back(dict.fromkeys(work.tenant for work in works))
        known = Pass(number=operation.number, works=works, max_tokens=operation.max_tokens)
        return unknown | self._passes.execute(known, self._tenants)

    def _create(self, operation: CreateTenant) -> TenantResult:
        spec = operation.spec
        if spec.name in self._tenants:
            raise DataError(f"there is a tenant {spec.name!r} already; remove it, or choose another name")

        def build() -> Tenant:
            with boundary(ConfigError, f"the weights and optimizer of {spec.name}"):
                return self._build(spec)

        tenant = self._agree(build)
        result = TenantResult(metrics=_size(tenant))
        try:
            if operation.path is not None:
                result = self._load(tenant, operation.path, with_optimizer=operation.with_optimizer)
        except BaseException:
            tenant.remove()
            raise
        tenant.attach()
        self._tenants[spec.name] = tenant
        self._bring_back([spec.name])
        logger.info("tenant %s: rank %d, %d parameters", spec.name, spec.rank, tenant.num_parameters)
        return result

    def _build(self, spec: TenantSpec) -> Tenant:
        """Raises: ConfigError for a tenant that this backbone does not support."""
        rest = (self._layers, self.model, self.mesh)
        if self._base is None:
            if spec.rank == 0:
                raise ConfigError("rank = 0: this service trains adapters; service.full_finetuning trains all")
            return Tenant(spec, read_spec(spec, self._max_rank), *rest)
        if spec.rank != 0:
            raise ConfigError(f"rank = {spec.rank}: this service trains all weights, and has no adapters")
        if self._tenants:
            raise ConfigError(f"all weights are those of {next(iter(self._tenants))}; remove it first")
        return FullTenant(spec, read_spec(spec, None), self._base, *rest)

    def _remove(self, name: str) -> TenantResult:
        if (tenant := self._tenants.pop(name, None)) is not None:
            tenant.remove()
            logger.info("tenant %s removed at step %d", name, tenant.step)
        return TenantResult()

    def _save(self, tenant: Tenant, operation: SaveTenant) -> TenantResult:
        path = Path(operation.path)

        def save() -> None:
            tenant.check_finite()
            if self.mesh.is_lead:
                state = tenant.state(operation.progress, with_optimizer=operation.with_optimizer)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_directory(path, state.slices, state.values | {"schema": SCHEMA, "cursor": {}})

        self._agree(save)
        return TenantResult(metrics={"step": float(tenant.step)})

    def _load(self, tenant: Tenant, path: str, *, with_optimizer: bool) -> TenantResult:
        def read() -> tuple[Callable[[], None], SavedState]:
            source = SavedState(Path(path), advice=_ADVICE)
            return tenant.read_state(source, with_optimizer=with_optimizer), source

        put, source = self._agree(read)
        put()
        return TenantResult(metrics=_size(tenant), progress=source.values.get("progress"))

    def _export(self, tenant: Tenant, directory: Path) -> TenantResult:
        def export() -> None:
            tenant.check_finite()
            if not self.mesh.is_lead:
                return
            if self._base is not None:
                self.export_model(directory, tenant.step)
                return
            base = None if self.model.scratch is not None else self.model.name
            with new_directory(directory, Mesh.single_rank(self.mesh.device)) as part:
                save_adapter(tenant.adapter(self.policy), part, tenant.lora, base)

        self._agree(export)
        return TenantResult(metrics={"step": float(tenant.step)})

    def export_model(self, directory: Path, step: int = 0) -> None:
        """Write the backbone's weights as a Hugging Face directory that engines can load as a version."""
        with new_directory(directory, self.mesh) as part:
            hub.save_hf(self.policy, part, self._tokenizer_dir)
            manifest = describe_files(part, version=step, location=directory)
            (part / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    def _agree(self, function: Callable[[], T]) -> T:
        """The function's result, if no rank has an error.

        Raises: DataError with the first rank's error, on all ranks.
        """
        reason = None
        try:
            result = function()
        except _DAMAGED as error:
            reason = str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"
        reasons = [each for each in self.mesh.gather(reason, str | None) if each is not None]
        if reasons:
            raise DataError(reasons[0])
        return result

    # -- memory --

    def _bring_back(self, names: Sequence[str] | dict[str, None]) -> None:
        """Move these tenants to the device, and the least recently used ones away if there are too many."""
        for name in names:
            tenant = self._tenants[name] = self._tenants.pop(name)
            tenant.move("device")
        if self._max_resident is None:
            return
        resident = [tenant for tenant in self._tenants.values() if tenant.place == "device"]
        for tenant in resident[: max(len(resident) - self._max_resident, 0)]:
            if tenant.spec.name not in names:
                tenant.move("disk" if self.mesh.device.type == "cpu" else "host", self._swap_folder)


def _size(tenant: Tenant) -> dict[str, float]:
    return {"step": float(tenant.step), "parameters": float(tenant.num_parameters)}
