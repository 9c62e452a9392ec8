"""`serve`: plans a training service, and runs engines, trainer ranks and the hub under one supervisor.

All processes are on this machine. One that ends is restarted: the hub finds all runs in RUN/service, and sends the
ranks the state of each.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from stretto.base import log, process, rundir
from stretto.base.errors import ConfigError, meant_path
from stretto.base.paths import RunDir
from stretto.base.ports import PortClaims, in_url
from stretto.base.secret import Secret, load_secret
from stretto.check.devices import check_served_on_cpu, check_trained_on_cpu
from stretto.check.models import check_model, check_served
from stretto.config.load import dump, write_json
from stretto.config.root import InferenceConfig
from stretto.config.sections.inference import KEY_VAR, ServedAdaptersSection
from stretto.data.hub_model import fetch, find_config
from stretto.launch.plan.engines import plan_engines
from stretto.launch.plan.placement import GPU_HOST_THREADS, client_host, free_port, replaced, with_free_port
from stretto.launch.plan.processes import (
    RENDEZVOUS_PORT,
    ProcessSpec,
    engine_processes,
    rank_env,
    section_of,
    stretto_process,
)
from stretto.launch.plan.specs import EnginesPlan
from stretto.launch.plan.table import process_table
from stretto.launch.run import supervisor
from stretto_service.access import prepare_tokens
from stretto_service.config import ServeConfig

STALL_S = 7 * 24 * 3600.0
"""A service may be silent for as long as it gets no requests."""
GRACE_S = 25.0
"""Between SIGTERM and SIGKILL: the hub first lets all runs be saved, within SAVE_S of main.py."""
RESTARTS = 100
CONFIG = "service"


@dataclass(frozen=True)
class ServicePlan:
    """The processes of a service."""

    config: ServeConfig
    inference: InferenceConfig | None
    engines: EnginesPlan | None
    processes: tuple[ProcessSpec, ...]
    notes: tuple[str, ...]


def plan(cfg: ServeConfig, ports: PortClaims, secret: Secret | None = None) -> ServicePlan:
    """Plan the processes of a service on this machine.

    secret: the service's, from which the engines' key is made if the user gave none; None in a dry run.

    Raises: ConfigError if the model, a port or GPUs are missing.
    """
    _check(cfg)
    notes: list[str] = []
    for key in ("service", "control"):
        cfg = with_free_port(cfg, key, ports, notes)
    gpus = process.visible_gpus()
    inference = engines = None
    engine_gpus: list[str] = []
    if not cfg.service.engine_urls:
        inference = with_engines(cfg, ports)
        engines = plan_engines(inference, [client_host(inference.server.host)], is_cpu=not gpus)
        engine_gpus = _gpus(gpus, cfg.inference_gpu_ids, sum(engine.num_gpus for engine in engines.engines), 0)
        urls = [url.removesuffix("/v1") for url in engines.admin_urls]
        cfg = replaced(cfg, "service.engine_urls", urls)
        if engines.base_urls != engines.admin_urls:
            cfg = replaced(cfg, "service.router_url", engines.base_urls[0].removesuffix("/v1"))
    if gpus and inference is not None and inference.device == "cpu":
        engine_gpus = []
    trainer_gpus = _gpus(gpus, cfg.trainer_gpu_ids, cfg.trainer.num_ranks, len(engine_gpus))
    if not trainer_gpus:
        check_trained_on_cpu(cfg.model, "model")
    if inference is not None and not engine_gpus:
        check_served_on_cpu(inference, "inference.")
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"name": cfg.run_name})})
    run = cfg.run_dir
    processes: list[ProcessSpec] = []
    key_env: dict[str, str] = {}
    if inference is not None and engines is not None:
        made = None if secret is None else secret.text_key("inference.api_key")
        key_env = {} if (text := inference.key or made) is None else {KEY_VAR: text}
        specs = engine_processes(inference, engines, run, is_held=False, gpus=engine_gpus, key_env=key_env)
        processes += [dataclasses.replace(spec, max_restarts=max(spec.max_restarts, RESTARTS)) for spec in specs]
    processes += _ranks(cfg, run, trainer_gpus, ports)
    hub_ports = {"http": cfg.service.port, "control": cfg.control.port}
    processes.append(stretto_process("hub", run, CONFIG, (), 1, key_env, hub_ports, max_restarts=RESTARTS))
    return ServicePlan(cfg, inference, engines, tuple(processes), tuple(notes))


def with_engines(cfg: ServeConfig, ports: PortClaims) -> InferenceConfig:
    """The config of the engines, with room for adapters and free ports."""
    section = cfg.inference_config()
    lora = section.lora
    if cfg.service.full_finetuning:
        section = section.model_copy(update={"engine": "embedded"})
    else:
        room = {"max_loras": cfg.service.max_adapters, "max_lora_rank": cfg.service.max_lora_rank}
        lora = (lora or ServedAdaptersSection()).model_copy(update=room)
    server, is_given = section.server, "port" in section.server.model_fields_set
    port = free_port("inference.server.port", server.host, server.port, is_given, ports)
    section = section.model_copy(
        update={"lora": lora, "server": server.model_copy(update={"port": port}), "max_restarts": RESTARTS}
    )
    if not process.visible_gpus():
        threads = section.num_threads or _threads(cfg)
        section = section.model_copy(update={"device": "cpu", "num_threads": threads})
    return section


def _threads(cfg: ServeConfig) -> int:
    """CPU threads of each rank and engine, which divide the cores among them."""
    parts = cfg.trainer.num_ranks + cfg.inference.deployment.num_engines
    return max(1, process.num_cores() // parts)


def _ranks(cfg: ServeConfig, run: RunDir, gpus: list[str], ports: PortClaims) -> list[ProcessSpec]:
    count = cfg.trainer.num_ranks
    port = free_port("rendezvous", "127.0.0.1", RENDEZVOUS_PORT, False, ports)
    threads = cfg.trainer.num_threads or (GPU_HOST_THREADS if gpus else _threads(cfg))
    specs = []
    for rank in range(count):
        env = cfg.trainer.env_vars | rank_env(rank, rank, count, "127.0.0.1", port)
        spec = stretto_process(
            "tenants", run, CONFIG, gpus[rank : rank + 1], threads, env, {},
            rank=rank, num_ranks=count, max_restarts=cfg.trainer.max_restarts,
        )  # fmt: skip
        specs.append(spec)
    return specs


def _gpus(gpus: list[str], ids: list[int] | None, count: int, first: int) -> list[str]:
    """GPUs of one part of the service.

    Raises: ConfigError if this machine does not have them.
    """
    if not gpus:
        return []
    ids = list(range(first, first + count)) if ids is None else ids
    if len(ids) < count or max(ids, default=-1) >= len(gpus):
        raise ConfigError(
            f"the service needs GPU {', '.join(map(str, ids))}, and this machine shows {len(gpus)}; lower "
            "trainer.num_ranks or inference.parallel, or name others with trainer_gpu_ids and inference_gpu_ids"
        )
    return [gpus[index] for index in ids]


def _check(cfg: ServeConfig) -> None:
    """Raises: ConfigError if the service could not start; called before any process starts."""
    if cfg.model.scratch is not None:
        raise ConfigError("[model.scratch]: a service needs a model that exists; make one with `sft`")
    if find_config(cfg.model.name) is None:
        raise ConfigError(
            f"[model] name = {cfg.model.name!r}: there is no such model; give a directory with config, safetensors and "
            f"tokenizer, or the name of a model on the Hugging Face Hub{meant_path(Path(cfg.model.name))}"
        )
    if cfg.service.full_finetuning and cfg.trainer.num_ranks > 1:
        raise ConfigError(
            f"service.full_finetuning with trainer.num_ranks = {cfg.trainer.num_ranks}: all weights are trained on one "
            "rank; leave trainer.num_ranks out"
        )
    if cfg.service.full_finetuning and cfg.inference.chosen_engine(has_gpu=False) == "vllm":
        raise ConfigError(
            "service.full_finetuning with vLLM: whole weights are loaded into the embedded engine only; use "
            'inference.engine = "embedded", without what only vLLM has'
        )
    check_model(cfg.model, cfg.trainer.num_ranks, "model")
    check_served(cfg.inference, cfg.inference.model or cfg.model.name, is_cpu=not process.visible_gpus())


def screen(cfg: ServeConfig) -> str:
    """What `--dry-run` shows."""
    with closing(PortClaims()) as ports:
        planned = plan(cfg, ports)
    cfg = planned.config
    users = ", ".join(cfg.service.users)
    lines = [
        f"service  {cfg.run_dir}",
        f"model    {cfg.model.name}",
        f"serves   {_served(cfg)}, for {users}",
        f"address  {address(cfg)}",
        f"tokens   {cfg.run_dir.path / 'tokens.json'}",
        "",
        process_table(planned.processes, ()),
        *(f"note: {note}" for note in planned.notes),
    ]
    return "\n".join(lines)


def _served(cfg: ServeConfig) -> str:
    if cfg.service.full_finetuning:
        return "one run at a time, which trains all weights"
    section = cfg.service
    return f"{section.max_concurrent_runs} runs at a time, adapters of rank up to {section.max_lora_rank}"


def address(cfg: ServeConfig) -> str:
    return f"http://{in_url(client_host(cfg.service.host))}:{cfg.service.port}"


def main(cfg: ServeConfig, words: Sequence[str] = ()) -> int:
    """Serve until stopped; the exit status. words: those of the command."""
    run = cfg.run_dir
    if cfg.clean:
        _clean(run)
    with rundir.claim_part(run, "service", is_new=False, clean=False), closing(PortClaims()) as ports:
        planned = plan(cfg, ports, load_secret(run))
        fetch(cfg.model.name, report=lambda text: sys.stdout.write(text + "\n"))
        write(planned)
        log.setup("launcher", run, cfg.log.level, cfg.log.json_logging, is_quiet=True)
        title = f"service at {address(planned.config)}, tokens in {run.path / 'tokens.json'}"
        return supervisor.serve(planned.processes, run, title, STALL_S, grace_s=GRACE_S)


def _clean(run: RunDir) -> None:
    """Delete a service with all its runs.

    Raises: ConfigError if the service runs, or the directory is not that of a service.
    """
    if run.path.exists() and any(run.path.iterdir()) and not (run.path / "service").is_dir():
        raise ConfigError(f"--clean: {run} is not the directory of a service; nothing was deleted")
    with rundir.claim_part(run, "service", is_new=False, clean=False):
        shutil.rmtree(run.path)


def write(planned: ServicePlan) -> None:
    """Write the configs of the processes; tokens of users go to a file of their own."""
    cfg, run = planned.config, planned.config.run_dir
    prepare_tokens(run.path / "tokens.json", {name: user.token for name, user in cfg.service.users.items()})
    users = {name: user.model_copy(update={"token": None}) for name, user in cfg.service.users.items()}
    cfg = replaced(cfg, "service.users", users)
    run.configs.mkdir(parents=True, exist_ok=True)
    write_json(run.config(CONFIG), dump(cfg))
    if planned.inference is not None and planned.engines is not None:
        for engine in planned.engines.engines:
            write_json(run.config(engine.name), dump(section_of(planned.inference, engine)))
