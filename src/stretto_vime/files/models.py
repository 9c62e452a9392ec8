"""--vllm-config: several models, each with server groups of its own.

    vllm:
      - name: actor
        server_groups: [{worker_type: regular, num_gpus: 8, num_gpus_per_engine: 4}]
      - name: ref
        model_path: /models/ref
        update_weights: false
        server_groups: [{worker_type: regular, num_gpus: 4, overrides: {max_model_len: 4096}}]

Regular groups may differ in all of this; prefill groups are alike, and so are decode groups. One model is updated:
the one without a path of its own, or with `update_weights: true`. Its groups become [inference], those of the others
[models.NAME]. Groups get their GPUs in the order of the file; the GPUs of a placeholder stay unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import ConfigError
from stretto_vime.files.read import check_keys, entries, read_yaml, typed

WORKERS = ("regular", "prefill", "decode", "placeholder")
MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
OWN_KEYS = ("gpu_memory_utilization", "max_model_len", "enable_expert_parallel")
"""Overrides that are keys of [inference]; all others are options of vLLM."""
REFUSED = {
    "tensor_parallel_size": "it is num_gpus_per_engine of the group",
    "data_parallel_size": "give it to all engines: --vllm-data-parallel-size",
    "pipeline_parallel_size": "give it to all engines: --vllm-pipeline-parallel-size",
    "model": "it is model_path of the model",
    "seed": "it is --rollout-seed",
    "dtype": "it is the trainer's, model.dtype",
}


@dataclass(frozen=True)
class ServerGroup:
    """Engines of one kind, or GPUs that no engine uses."""

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: dict[str, Any] = field(default_factory=dict)
    first_gpu: int = 0

    @property
    def gpu_ids(self) -> list[int]:
        return list(range(self.first_gpu, self.first_gpu + self.num_gpus))

    @property
    def num_engines(self) -> int:
        return self.num_gpus // self.num_gpus_per_engine if self.num_gpus else 1


@dataclass(frozen=True)
class ServedModel:
    """One model of the file."""

    name: str
    path: str | None
    is_updated: bool
    groups: tuple[ServerGroup, ...]

    @property
    def engines(self) -> list[ServerGroup]:
        """The groups with engines."""
        return [group for group in self.groups if group.worker_type != "placeholder"]

    @property
    def num_gpus(self) -> int:
        """GPUs of its engines."""
        return sum(group.num_gpus for group in self.engines)

    @property
    def gpu_ids(self) -> list[int]:
        return [index for group in self.engines for index in group.gpu_ids]

    def count(self, worker_type: str) -> int:
        """Engines of one kind."""
        return sum(group.num_engines for group in self.engines if group.worker_type == worker_type)

    @property
    def differs(self) -> bool:
        """Whether its regular engines are of several shapes."""
        shapes = [(group.num_gpus_per_engine, group.overrides) for group in self.engines]
        return not self.count("prefill") and any(shape != shapes[0] for shape in shapes)

    @property
    def _alike(self) -> dict[str, Any]:
        """Overrides that all of its groups have."""
        first, *others = (group.overrides for group in self.engines)
        is_alike = lambda key: all(key in other and other[key] == first[key] for other in others)
        return {key: value for key, value in first.items() if is_alike(key)}

    def settings(self, at: str) -> Iterator[tuple[str, Any]]:
        """Keys below `at` that its groups' overrides set: for all engines, or for those that read prompts or write
        replies alone. What differs between regular groups is in their `tables`."""
        for key, value in self._alike.items():
            yield (f"{at}.{key}" if key in OWN_KEYS else f"{at}.vllm_extra.{key}"), value
        if self.count("prefill"):
            for group in self.engines:
                for key in group.overrides.keys() - self._alike.keys():
                    table = f"{at}.deployment.{group.worker_type}_vllm_overrides"
                    yield f"{table}.{key}", group.overrides[key]

    def tables(self, shards: int, *, is_wide: bool) -> list[dict[str, Any]]:
        """Its groups as those of deployment.type = "groups".

        shards: GPUs of an engine for each rank of tensor parallelism. is_wide: over several machines, where
        placeholders are GPUs that are left idle; on one, other keys name the GPUs of engines.
        """
        found: list[dict[str, Any]] = []
        for group in self.groups:
            if group.worker_type != "placeholder":
                rest = {key: value for key, value in group.overrides.items() if key not in self._alike}
                table = {"num_engines": group.num_engines, "tp": group.num_gpus_per_engine // shards}
                found.append(table | ({"overrides": rest} if rest else {}))
            elif is_wide:
                last = found[-1] if found else {"num_engines": 0}
                found = found or [last]
                last["idle_gpus"] = last.get("idle_gpus", 0) + group.num_gpus
        return found


def read_models(path: str, where: str, *, checkpoint: str, per_engine: int) -> list[ServedModel]:
    """The models of a file, checked.

    where: the flag. checkpoint: the model that is trained. per_engine: GPUs of an engine where the file says nothing.

    Raises: ConfigError for the first thing that is wrong.
    """
    models: list[ServedModel] = []
    first_gpu = 0
    for number, entry in enumerate(entries(read_yaml(path, where), "vllm", where)):
        at = f"{where}: vllm[{number}]"
        check_keys(entry, MODEL_KEYS, at)
        name = typed(entry, "name", str, at)
        if not name:
            raise ConfigError(f"{at}: name is missing; functions request a model by it")
        at = f"{where}: model {name}"
        if any(model.name == name for model in models):
            raise ConfigError(f"{at}: there are two of this name; give each its own")
        groups, first_gpu = _groups(entry, at, per_engine, first_gpu)
        own_path = typed(entry, "model_path", str, at)
        is_updated = typed(entry, "update_weights", bool, at, own_path in (None, checkpoint))
        if is_updated and own_path not in (None, checkpoint):
            raise ConfigError(
                f"{at}: model_path {own_path} with update_weights: true: the updated model is --hf-checkpoint "
                f"{checkpoint}; leave one of the two out"
            )
        models.append(ServedModel(name, own_path or checkpoint, is_updated, groups))
    _check_updated(models, where)
    return models


def _check_updated(models: Sequence[ServedModel], where: str) -> None:
    updated = [model.name for model in models if model.is_updated]
    if len(updated) != 1:
        got = f"{' and '.join(updated)} are updated" if updated else "no model is updated"
        raise ConfigError(
            f"{where}: {got}, and one is trained; write `update_weights: false` at the frozen ones, and leave it out "
            "at the one that is trained"
        )
    for model in models:
        if not model.engines:
            raise ConfigError(f"{where}: model {model.name} has placeholders only; give it a group of engines")


def _groups(entry: dict[str, Any], at: str, per_engine: int, first_gpu: int) -> tuple[tuple[ServerGroup, ...], int]:
    """The groups of a model, and the first GPU after them."""
    key = "engine_groups" if "engine_groups" in entry else "server_groups"
    given = typed(entry, key, list, at)
    if not given or not all(isinstance(each, dict) for each in given):
        raise ConfigError(f"{at}: {key} must be a list of groups, such as {{worker_type: regular, num_gpus: 8}}")
    each_engine = typed(entry, "num_gpus_per_engine", int, at, per_engine)
    groups = []
    for number, raw in enumerate(given):
        table = {str(name).replace("-", "_"): value for name, value in raw.items()}
        group = _group(table, f"{at}, {key}[{number}]", each_engine, first_gpu)
        groups.append(group)
        first_gpu += group.num_gpus
    _check_kinds(groups, at)
    return tuple(groups), first_gpu


def _group(table: dict[str, Any], at: str, per_engine: int, first_gpu: int) -> ServerGroup:
    check_keys(table, GROUP_KEYS, at)
    kind = typed(table, "worker_type", str, at, "regular")
    if kind == "encoder":
        raise ConfigError(f"{at}: worker_type encoder: pictures are read by the engines themselves; leave it out")
    if kind not in WORKERS:
        raise ConfigError(f"{at}: worker_type {kind}: must be {' or '.join(WORKERS)}")
    num_gpus = typed(table, "num_gpus", int, at)
    size = typed(table, "num_gpus_per_engine", int, at, per_engine)
    if num_gpus is None or num_gpus < 0 or size < 1:
        raise ConfigError(f"{at}: num_gpus must be given, 0 (the CPU) or more, and num_gpus_per_engine 1 or more")
    if kind != "placeholder" and num_gpus % size:
        rule = f"{num_gpus} GPUs are no whole number of engines of {size}"
        raise ConfigError(f"{at}: {rule}; change num_gpus or num_gpus_per_engine")
    overrides = {str(k).replace("-", "_"): v for k, v in (typed(table, "overrides", dict, at) or {}).items()}
    for key in overrides:
        if key in REFUSED:
            raise ConfigError(f"{at}: overrides.{key} is not yours to set: {REFUSED[key]}; leave it out")
    return ServerGroup(kind, num_gpus, size, overrides, first_gpu)


def _check_kinds(groups: Sequence[ServerGroup], at: str) -> None:
    """Regular engines, or both kinds of the others, which are alike in GPUs and options."""
    engines = [group for group in groups if group.worker_type != "placeholder"]
    kinds = {group.worker_type for group in engines}
    if "regular" in kinds and len(kinds) > 1:
        raise ConfigError(f"{at}: regular engines beside prefill or decode; use one of the two ways")
    if len(kinds) == 1 and "regular" not in kinds:
        missing = "decode" if "prefill" in kinds else "prefill"
        raise ConfigError(f"{at}: {kinds.pop()} engines need {missing} engines; add a group of them")
    for kind in sorted(kinds - {"regular"}):
        alike = [group for group in engines if group.worker_type == kind]
        for name in ("num_gpus_per_engine", "overrides"):
            first, *others = (getattr(group, name) for group in alike)
            if different := [value for value in others if value != first]:
                raise ConfigError(
                    f"{at}: its groups differ in {name}, {first} and {different[0]}; {kind} engines of a model are "
                    "alike, give these groups the same"
                )
