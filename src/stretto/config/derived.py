"""Values of keys that are not given, derived from those that are: a root's `_derived`.

Each function receives the given values by dotted path in our spelling and returns further ones. A given value is never
replaced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from stretto.base.ports import in_url
from stretto.config.sections.model import ModelSection
from stretto.config.sections.run import ServiceRunSection

LOCAL_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::")
CLOCK_CKPT_INTERVAL = 20
"""Steps between checkpoints of a deterministic run; those of others are due by the clock."""
Values = Mapping[str, Any]
"""Given values by dotted path in our spelling."""


def comma_list(value: Any) -> Any:
    """A list of ids, given as a list, as `0,1,2` or as a single id."""
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)*", value := value.replace(" ", "")):
        return [int(item) for item in value.split(",")]
    return [value] if isinstance(value, int) else value


def _has(values: Values, table: str) -> bool:
    """Whether the table, or a key in it, is given."""
    return values.get(table) is not None or any(path.startswith(f"{table}.") for path in values)


def _starts_engine(values: Values) -> bool:
    return values.get("inference", {}) is not None and not _has(values, "service")


def _derive_engine(values: Values) -> dict[str, Any]:
    """The engine has the model, dtype, seed and log of the run, unless it has its own."""
    if not _starts_engine(values):
        return {}
    same = {path: path for path in values if path.startswith("log.")} | {"seed": "seed", "model.dtype": "dtype"}
    copied = {f"inference.{own}": values[path] for path, own in same.items() if path in values}
    return copied | {"inference.model": values.get("model.name", ModelSection().name)}


def _derive_model(values: Values) -> dict[str, Any]:
    """The model is the engine's if only that is named; if both are, weights get the engine's layout."""
    trained, served = values.get("model.name"), values.get("inference.model")
    if served is None or served == trained:
        return {}
    if trained is None and not _has(values, "model.scratch"):
        return {"model.name": served}
    return {"weight_broadcast.engine_model": served}


def derive_template(values: Values, renderer: str) -> dict[str, Any]:
    """A chat template that is given for the renderer is the tokenizer's, and the other way round."""
    paths = (f"{renderer}.template", "tokenizer.chat_template")
    given = next((values[path] for path in paths if values.get(path) is not None), None)
    return {} if given is None else dict.fromkeys(paths, given)


def _derive_wire(values: Values) -> dict[str, Any]:
    """Over several machines weights are broadcast, because shared memory ends at one machine."""
    is_wide = values.get("deployment.type") == "multi_node"
    # NCCL connects no two processes of one GPU.
    kind = "filesystem" if _has(values, "colocate") else "collective"
    return {"weight_broadcast.type": kind} if is_wide else {}


def derive_remote_wire(values: Values) -> dict[str, Any]:
    """To engines of other machines weights are files in the run directory, which all processes see."""
    urls = " ".join(str(values.get(f"client.{key}", "")) for key in ("base_url", "admin_base_url"))
    hosts = {host.strip("[]") for host in re.findall(r"https?://(?:[^/@\s]*@)?(\[[^]]+\]|[^:/\s\"',\]]+)", urls)}
    return {"weight_broadcast.type": "filesystem"} if hosts - set(LOCAL_HOSTS) else {}


def derive_copies(values: Values) -> dict[str, Any]:
    """Each group of nodes that shares the weights has one copy of them."""
    nodes, group = (values.get(f"deployment.{key}") for key in ("num_train_nodes", "nodes_per_fsdp_group"))
    is_whole = isinstance(nodes, int) and isinstance(group, int) and group > 0 and nodes % group == 0
    return {"model.dp_replicate": nodes // group} if is_whole else {}  # type: ignore[operator]


def _derive_infer_nodes(values: Values) -> dict[str, Any]:
    """Over several machines, the nodes of one replica of inference, and engines that take all GPUs of a node."""
    if values.get("deployment.type") != "multi_node" or not _starts_engine(values):
        return {}
    if "inference.deployment.type" in values:
        return {}
    nodes, gpus = values.get("deployment.num_infer_nodes"), values.get("deployment.infer_gpus_per_node")
    gpus = values.get("deployment.gpus_per_node", 8) if gpus is None else gpus
    if not isinstance(nodes, int):
        return _on_all_gpus(values, gpus)
    shape = {"inference.deployment.type": "multi_node", "inference.deployment.num_nodes": nodes}
    if isinstance(gpus, int):
        shape |= {"inference.deployment.gpus_per_node": gpus} if gpus > 0 else {}
        is_wide = values.get("inference.enable_expert_parallel") in (True, "true")
        # With expert parallelism the nodes form one engine, whose ranks they divide.
        shape |= _engine_ranks(values, gpus * nodes if is_wide else gpus)
    return shape


def _on_all_gpus(values: Values, gpus: Any) -> dict[str, Any]:
    """Ranks of an engine, or embedded engines, that take all GPUs; {} if a shape is given, or one rank takes them."""
    is_shaped = any(path.startswith(("inference.deployment", "inference.parallel.dp")) for path in values)
    if is_shaped or not isinstance(gpus, int) or values.get("inference.device") == "cpu":
        return {}
    found = _engine_ranks(values, gpus)
    ranks = found.get("inference.parallel.dp", 1)
    if ranks < 2:
        return {}
    is_embedded = values.get("inference.engine") == "embedded"
    return {"inference.deployment.num_replicas": ranks} if is_embedded else found


def _engine_ranks(values: Values, gpus: int) -> dict[str, Any]:
    """The data-parallel ranks of an engine that fills some GPUs; {} if its ranks do not."""
    degrees = [values.get(f"inference.parallel.{axis}", 1) for axis in ("tp", "pp")]
    if not all(isinstance(degree, int) and degree > 0 for degree in degrees):
        return {}
    ranks, left = divmod(gpus, math.prod(degrees))
    return {} if left or not ranks else {"inference.parallel.dp": ranks}


def _derive_infer_gpus(values: Values) -> dict[str, Any]:
    """Without a number of engines, GPUs of one machine are ranks of one engine, or embedded engines."""
    if values.get("deployment.type") == "multi_node" or not _starts_engine(values):
        return {}
    return _on_all_gpus(values, _num_gpus(values, "inference_gpu_ids", "deployment.num_infer_gpus"))


def _derive_client_url(values: Values) -> dict[str, Any]:
    """The orchestrator uses the engine that this run starts, unless another address is given."""
    host, port = values.get("inference.server.host"), values.get("inference.server.port")
    if not _starts_engine(values) or (host is None and port is None):
        return {}
    host = "127.0.0.1" if host in (None, "0.0.0.0", "::") else host
    return {"orchestrator.client.base_url": f"http://{in_url(str(host))}:{8000 if port is None else port}/v1"}


def _derive_service(values: Values) -> dict[str, Any]:
    """A run on a service starts no engine, sends its token as engine key, and exports no weights."""
    if not _has(values, "service"):
        return {}
    found: dict[str, Any] = {} if _has(values, "inference") else {"inference": None}
    variable = values.get("service.token_var", ServiceRunSection().token_var)
    found["orchestrator.client.api_key_var"] = variable
    if values.get("ckpt", {}) is not None and not _has(values, "ckpt.weights"):
        found["ckpt.weights"] = None
    return found


def _derive_turns(values: Values) -> dict[str, Any]:
    """Trainer and engines that take turns run synchronous steps, and the engines can sleep."""
    if not _has(values, "colocate"):
        return {}
    sleep = {"inference.enable_sleep_mode": True} if _starts_engine(values) else {}
    return {"orchestrator.max_async_level": 0} | sleep


def _derive_clock(values: Values) -> dict[str, Any]:
    """A deterministic run has checkpoints at steps, from which it goes on as it would have."""
    if values.get("deterministic") not in (True, "true"):
        return {}
    found: dict[str, Any] = {"trainer.is_deterministic": True}
    interval = values.get("ckpt.interval")
    if values.get("ckpt", {}) is None:
        return found
    if interval is None:
        every = values.get("weight_broadcast.interval")
        every = every if isinstance(every, int) and every > 0 else 1
        interval = math.ceil(CLOCK_CKPT_INTERVAL / every) * every  # a version that engines get
        found |= {"ckpt.interval": interval} | ({} if _has(values, "ckpt.keep_last") else {"ckpt.keep_last": 2})
    return found | {"orchestrator.sync_interval": interval}


def _derive_replay(values: Values) -> dict[str, Any]:
    """An engine returns its choices of experts and sampling masks if the trainer replays them."""
    experts = values.get("trainer.enable_router_replay") in (True, "true")
    masks = _has(values, "orchestrator.train.replay")
    is_on = {"enable_return_routed_experts": experts, "enable_return_sampling_mask": masks}
    return {f"inference.{key}": True for key, on in is_on.items() if on and _starts_engine(values)}


def _derive_whiten(values: Values) -> dict[str, Any]:
    """The orchestrator does not whiten scores if the trainer turns them into advantages."""
    algos = [path for path in values if re.fullmatch(r"orchestrator\.(env\.\d+\.)?algo\.type", path)]
    whitens = [path for path in algos if str(values[path]).startswith("reinforce_plus_plus")]
    return {path.replace(".type", ".whiten"): False for path in whitens if _has(values, "trainer.advantages")}


def _derive_teacher(values: Values) -> dict[str, Any]:
    """A teacher with a model and no address is served by this run, under that name."""
    name, has_engine = values.get("orchestrator.teacher.model"), _has(values, "teacher_inference")
    served = [values.get(f"teacher_inference.{key}") for key in ("served_model_name", "model")]
    if not _has(values, "orchestrator.teacher"):
        return {"orchestrator.teacher.model": served[0] or served[1]} if has_engine else {}
    is_served = name is not None and (has_engine or values.get("orchestrator.teacher.base_url") is None)
    return {"teacher_inference.model": name} if is_served else {}


def _derive_num_train_workers(values: Values) -> dict[str, Any]:
    """One rank per trainer GPU, if the GPUs are given."""
    ranks = _num_gpus(values, "trainer_gpu_ids", "deployment.num_train_gpus")
    if ranks is None and values.get("deployment.type") == "multi_node":
        nodes, gpus = values.get("deployment.num_train_nodes", 1), values.get("deployment.gpus_per_node", 8)
        ranks = _num_ranks(nodes, gpus)
    return _workers(values, "orchestrator.num_train_workers", ranks)


def _derive_critic_workers(values: Values) -> dict[str, Any]:
    """One rank per GPU of the critic, if these are given; such a critic has ranks of its own."""
    ranks = _num_gpus(values, "critic_gpu_ids", "deployment.num_critic_gpus")
    nodes, each = (values.get(f"deployment.{key}") for key in ("num_critic_nodes", "critic_gpus_per_node"))
    if values.get("deployment.type") == "multi_node" and (nodes is not None or each is not None):
        nodes = values.get("deployment.num_train_nodes", 1) if nodes is None else nodes
        ranks = _num_ranks(nodes, values.get("deployment.gpus_per_node", 8) if each is None else each)
    is_present = _has(values, "trainer.critic")
    return _workers(values, "trainer.critic.placement.num_workers", ranks) if is_present else {}


def _num_gpus(values: Values, ids_key: str, count_key: str) -> Any:
    ids = comma_list(values.get(ids_key))
    return len(ids) if isinstance(ids, list) and ids else values.get(count_key)


def _num_ranks(nodes: Any, gpus: Any) -> int | None:
    """Ranks of some nodes, one per GPU, or one per node without GPUs."""
    return nodes * max(1, gpus) if isinstance(nodes, int) and isinstance(gpus, int) else None


def _workers(values: Values, key: str, ranks: Any) -> dict[str, Any]:
    """Ranks that receive different batches: those of the axes cp, tp and pp share one."""
    degrees = [values.get(name) for name in ("model.cp", "model.tp", "trainer.megatron.pp")]
    sharing = math.prod(degree if isinstance(degree, int) and degree > 0 else 1 for degree in degrees)
    return {key: max(1, ranks // sharing)} if isinstance(ranks, int) and ranks > 0 else {}


DERIVED = (
    _derive_model, _derive_wire, _derive_engine, derive_copies, _derive_infer_nodes, _derive_infer_gpus,
    _derive_client_url, _derive_service, _derive_num_train_workers, _derive_critic_workers, _derive_turns,
    _derive_replay, _derive_teacher, _derive_whiten, _derive_clock,
)  # fmt: skip
