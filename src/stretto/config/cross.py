"""Rules between the sections of `rl`: one engine, one set of ports, one set of GPUs.

Rules within a section are in checks.py; keys that mean the same in several sections in shared.py.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stretto.config.algorithm_checks import check_credit_fits
from stretto.config.checks import (
    LOCAL_HOSTS,
    check_inference,
    check_orchestrator,
    check_trainer,
    is_address,
    urls,
)
from stretto.config.distill_checks import check_loss_is_used, check_teacher_engine
from stretto.config.mesh_checks import check_mesh
from stretto.config.shared import Problem

if TYPE_CHECKING:
    from stretto.config.inference import InferenceSection
    from stretto.config.roots import RLConfig


def check_rl(cfg: RLConfig) -> list[Problem]:
    """Sections against each other."""
    problems = check_trainer(cfg.trainer, "trainer") + check_orchestrator(cfg.orchestrator, "orchestrator")
    if cfg.inference is not None:
        problems += check_inference(cfg.inference, "inference")
        problems += check_engine_fits(cfg, cfg.inference)
    if cfg.teacher_inference is not None:
        problems += check_inference(cfg.teacher_inference, "teacher_inference")
    problems += check_teacher_engine(cfg) + check_loss_is_used(cfg)
    problems += check_credit_fits(cfg.trainer, cfg.orchestrator)
    problems += check_mesh(cfg)
    return (
        problems + check_control(cfg) + check_ports(cfg) + check_gpus(cfg) + check_nodes(cfg) + check_ipc(cfg)
    )


def check_control(cfg: RLConfig) -> list[Problem]:
    """The control that must not learn has no other gradient either, be it one environment of several."""
    envs = enumerate(cfg.orchestrator.env)
    own = [f"orchestrator.env.{i}.algo.type" for i, env in envs if env.algo and env.algo.type == "zero"]
    at_top = ["orchestrator.algo.type"] if cfg.orchestrator.algo.type == "zero" else []
    zeros = at_top + own
    if not zeros:
        return []
    for key in ("entropy_coef", "reference_kl"):
        if getattr(cfg.trainer.loss, key) is not None:
            where = f"trainer.loss.{key}"
            return [
                Problem(
                    (where, *at_top),
                    f'{zeros[0]} = "zero" with {where}: its gradient would be learned; drop it',
                )
            ]
    kl_tau = getattr(cfg.trainer.loss, "kl_tau", 0.0)
    if not kl_tau:
        return []
    why = "would be learned from its tokens"
    if not {(env.algo or cfg.orchestrator.algo).type for env in cfg.orchestrator.env} - {"zero"}:
        why = "would be the only gradient, and an optimizer that does not care how small a gradient is makes full "
        why += "steps of it"
    message = (
        f'{zeros[0]} = "zero" with trainer.loss.kl_tau = {kl_tau:g}: the pull towards the sampling policy {why}; '
        "set trainer.loss.kl_tau = 0"
    )
    return [Problem(("trainer.loss.kl_tau", *at_top), message)]


def check_engine_fits(cfg: RLConfig, inference: InferenceSection) -> list[Problem]:
    """The orchestrator talks to the engine that this run starts, and the engine takes what it sends."""
    problems = []
    if cfg.trainer.model.scratch is not None:
        message = (
            "trainer.model.scratch makes a network that no engine has, and the engine starts from a directory; make "
            "one with `sft` (its weights are in RUN/weights/latest) and give it as model.name"
        )
        problems.append(Problem(("trainer.model.scratch",), message))
    if cfg.trainer.enable_router_replay and not inference.enable_return_routed_experts:
        paths = ("trainer.enable_router_replay", "inference.enable_return_routed_experts")
        message = (
            f"{paths[0]} = true but {paths[1]} = false: there would be nothing to replay; drop the latter"
        )
        problems.append(Problem(paths, message))
    addresses = [urlsplit(url) for url in urls(cfg.orchestrator.client) if is_address(url)]
    places = {(parts.hostname, parts.port or 80) for parts in addresses}
    port = inference.server.port
    hosts = (*LOCAL_HOSTS, inference.server.host)
    if places and not any(host in hosts and url_port == port for host, url_port in places):
        paths = ("orchestrator.client.base_url", "inference.server.port")
        given = ", ".join(urls(cfg.orchestrator.client))
        message = (
            f'orchestrator.client.base_url = "{given}" but the engine of this run '
            f"listens on inference.server.port = {port}; make them agree, leave base_url out, or use "
            f"--no-inference for engines that already run"
        )
        problems.append(Problem(paths, message))
    if inference.max_model_len is not None and inference.max_model_len < cfg.orchestrator.seq_len:
        rule = f"is shorter than orchestrator.seq_len = {cfg.orchestrator.seq_len}; raise it or lower seq_len"
        message = f"inference.max_model_len = {inference.max_model_len} {rule}"
        problems.append(Problem(("inference.max_model_len", "orchestrator.seq_len"), message))
    if inference.device == "cpu" and cfg.inference_gpu_ids:
        message = 'inference.device = "cpu" but inference_gpu_ids names GPUs; drop one of the two'
        problems.append(Problem(("inference.device", "inference_gpu_ids"), message))
    return problems


def check_ports(cfg: RLConfig) -> list[Problem]:
    """Every listener of this machine has a port of its own."""
    ports = {"orchestrator.control.port": cfg.orchestrator.control.port}
    if cfg.orchestrator.rollout_transport.type == "zmq":
        ports["orchestrator.rollout_transport.port"] = cfg.orchestrator.rollout_transport.port
    if cfg.inference is not None:
        ports["inference.server.port"] = cfg.inference.server.port
    problems = []
    for port, count in Counter(ports.values()).items():
        if count > 1:
            paths = tuple(path for path, other in ports.items() if other == port)
            problems.append(
                Problem(paths, f"{' and '.join(paths)} are both {port}; give each a port of its own")
            )
    return problems


def check_gpus(cfg: RLConfig) -> list[Problem]:
    """GPU ids against counts, twice-named ids, and a GPU shared by trainer and engine."""
    problems = []
    counts = {
        "trainer_gpu_ids": "num_train_gpus",
        "inference_gpu_ids": "num_infer_gpus",
        "teacher_gpu_ids": "num_teacher_gpus",
    }
    for key, count_key in counts.items():
        ids, count = getattr(cfg, key), getattr(cfg.deployment, count_key)
        if ids is None:
            continue
        if not ids or len(set(ids)) < len(ids) or min(ids) < 0:
            problems.append(
                Problem((key,), f"{key} = {ids}: give each GPU once, counted from 0, such as 0,1")
            )
        elif count is not None and count != len(ids):
            rule = f"deployment.{count_key} = {count}; drop one of the two"
            problems.append(
                Problem((key, f"deployment.{count_key}"), f"{key} = {ids} are {len(ids)} GPUs but {rule}")
            )
    given = len(cfg.inference_gpu_ids or ()) or cfg.deployment.num_infer_gpus or 0
    engine = cfg.inference
    if engine is not None and engine.chosen_engine(has_gpu=True) == "embedded":
        replicas = engine.deployment.num_processes
        if given > replicas:
            key = "inference_gpu_ids" if cfg.inference_gpu_ids else "deployment.num_infer_gpus"
            message = (
                f"{key}: {given} GPUs, and each embedded engine runs on one; give inference {replicas}, set "
                f"inference.deployment.num_replicas = {given}, or inference.parallel with vLLM"
            )
            problems.append(Problem((key, "inference.deployment.num_replicas"), message))
    ranks = len(cfg.trainer_gpu_ids or ()) or cfg.deployment.num_train_gpus or 0
    if ranks and ranks != cfg.num_train_ranks:
        key = "trainer_gpu_ids" if cfg.trainer_gpu_ids else "deployment.num_train_gpus"
        model, workers = cfg.trainer.model, cfg.orchestrator.num_train_workers
        message = f"orchestrator.num_train_workers = {workers} but {key} gives {ranks} trainer ranks"
        way_out = "leave num_train_workers out"
        if (sharing := model.cp * model.tp) > 1:
            message += f", {sharing} (trainer.model.cp x tp) to a worker"
            way_out += f", and give a multiple of {sharing} GPUs"
        problems.append(Problem(("orchestrator.num_train_workers", key), f"{message}; {way_out}"))
    shared = set(cfg.trainer_gpu_ids or ()) & set(cfg.inference_gpu_ids or ())
    if shared and cfg.inference is not None and cfg.inference.gpu_memory_utilization > 0.8:
        paths = ("trainer_gpu_ids", "inference_gpu_ids", "inference.gpu_memory_utilization")
        message = (
            f"trainer and inference share GPU {', '.join(map(str, sorted(shared)))}, and {paths[2]} = "
            f"{cfg.inference.gpu_memory_utilization:g} leaves the trainer nothing; lower it, such as to 0.5"
        )
        problems.append(Problem(paths, message))
    return problems


def check_nodes(cfg: RLConfig) -> list[Problem]:
    """A run over several machines: enough of them, ranks on each, wires that reach from one to another."""
    shape = cfg.deployment
    if shape.type != "multi_node":
        return []
    problems = []
    for key in ("trainer_gpu_ids", "inference_gpu_ids", "teacher_gpu_ids", "teacher_inference"):
        if getattr(cfg, key) is not None:
            message = f'{key} names what is on one machine; with deployment.type = "multi_node" leave it out'
            problems.append(Problem((key, "deployment.type"), message))
    if cfg.weight_broadcast.type == "shm":
        path, rule = (
            "weight_broadcast.type",
            'shared memory ends at one machine; use "collective" or "filesystem"',
        )
        problems.append(Problem((path, "deployment.type"), f'{path} = "shm": {rule}'))
    needed = 0 if cfg.inference is None else cfg.inference.deployment.num_nodes
    if cfg.inference is not None and shape.num_infer_nodes not in (None, needed):
        paths = ("deployment.num_infer_nodes", "inference.deployment")
        rule = f"but {paths[1]} takes {needed} node{'s' * (needed != 1)}; make them agree, or leave it out"
        problems.append(Problem(paths, f"{paths[0]} = {shape.num_infer_nodes} {rule}"))
    total = shape.num_train_nodes + shape.num_infer_replicas * needed
    if shape.hosts is not None and len(shape.hosts) != total:
        rule = f"{shape.num_train_nodes} of the trainer and {total - shape.num_train_nodes} of inference"
        problems.append(
            Problem(
                ("deployment.hosts",),
                f"deployment.hosts: {len(shape.hosts)} are given; it takes {total}, {rule}",
            )
        )
    if shape.node_rank is not None and shape.node_rank >= total:
        path = "deployment.node_rank"
        problems.append(Problem((path,), f"{path} = {shape.node_rank}: the {total} nodes are counted from 0"))
    workers = cfg.orchestrator.num_train_workers
    if cfg.num_train_ranks % shape.num_train_nodes:
        paths = ("orchestrator.num_train_workers", "deployment.num_train_nodes")
        rule = f"are divided among {paths[1]} = {shape.num_train_nodes} nodes; give a multiple"
        problems.append(Problem(paths, f"{paths[0]} = {workers} {rule}"))
    return problems


def check_ipc(cfg: RLConfig) -> list[Problem]:
    """Memory of one GPU is mapped by one engine in one process, on that GPU."""
    path, inference = "weight_broadcast.type", cfg.inference
    if cfg.weight_broadcast.type != "ipc":
        return []
    found: list[tuple[str, str]] = []
    if cfg.weight_broadcast.delta is not None:
        found.append(("weight_broadcast.delta", "copies go through the memory of the host"))
    if cfg.deployment.type == "multi_node":
        found.append(("deployment.type", "its engines are on other machines"))
    if inference is None:
        found.append(("inference", "there is no engine of this run's on its GPU"))
    elif inference.device == "cpu":
        found.append(("inference.device", "the engine has no GPU"))
    elif inference.deployment.num_processes * inference.parallel.tp * inference.parallel.dp > 1:
        found.append(("inference.deployment", "one process can map the memory, and there are several"))
    if cfg.orchestrator.num_train_workers > 1:
        found.append(
            ("orchestrator.num_train_workers", "trainer and engine share one GPU, and there are several")
        )
    return [
        Problem((path, other), f'{path} = "ipc" with {other}: {why}; use "shm" or "collective"')
        for other, why in found
    ]
