"""The verb `eval`: plays held-out tasks with running engines, or with one that it starts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from stretto.base import log, process
from stretto.base.errors import ConfigError, EngineError
from stretto.base.foreign import warn_when_blocked
from stretto.base.ports import is_free, unused_port
from stretto.base.status import STATUS_FD_VAR, harmless, report
from stretto.chat.render import Renderer
from stretto.config.load import dump, write_json
from stretto.config.root import EvalConfig, InferenceConfig
from stretto.config.sections.inference import KEY_VAR
from stretto.data.hub_model import fetch
from stretto.envs.base import tasks_of
from stretto.monitors.base import MONITOR_CLOSE_S, build_monitors
from stretto.orchestrator.beside import open_beside
from stretto.orchestrator.build import build_eval_renderer, open_env, run_info
from stretto.orchestrator.clients import build_chat, build_engines
from stretto.orchestrator.eval.evaluator import standalone_evaluator
from stretto.orchestrator.eval.results import format_table, write_results
from stretto.orchestrator.eval_scores import EvalScore, eval_row
from stretto.records.generate import GenerateRequest, SamplingParams
from stretto.transports.engine.client import EngineClient

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=EvalConfig)


def main(cfg: EvalConfig) -> int:
    """Evaluate running engines, or one started for `cfg.model`; returns the exit status.

    Prints a table; writes eval.json, samples, and a row of metrics. An error or a signal leaves the table and eval.json
    of what was evaluated before it.

    Raises: ConfigError for the directory of a run that trains, and what `evaluate_engine` raises.
    """
    if cfg.run_dir.config("run").exists():
        what = f"run.name = {cfg.run_name!r} is a run that trains, in {cfg.run_path}"
        raise ConfigError(f"{what}; an eval writes other files there: give it a name of its own, --run.name NAME")
    cfg.run_dir.configs.mkdir(parents=True, exist_ok=True)
    has_reader = bool(os.environ.get(STATUS_FD_VAR))  # of status lines: a script or notebook
    log.setup("eval", cfg.run_dir, cfg.log.level, cfg.log.json_logging, is_quiet=has_reader)
    path, scores = cfg.run_path / "eval.json", list[EvalScore]()
    if path.exists():
        text = "%s is of an earlier eval, and this one replaces it; --run.name gives this one a directory of its own"
        logger.warning(text, path)
    kept = dump(cfg)
    del kept["inference"]["api_key"]  # it is written to no file
    write_json(cfg.run_dir.config("eval"), kept)
    try:
        asyncio.run(evaluate_engine(cfg, scores))
    except asyncio.CancelledError:
        sys.stderr.write("terminated\n")
        return 128 + signal.SIGTERM
    finally:
        if scores:
            write_results(path, scores)
            sys.stdout.write(harmless(format_table(scores)) + f"\n\n{path}\n")
            sys.stdout.flush()
    return 0


async def evaluate_engine(cfg: EvalConfig, scores: list[EvalScore] | None = None) -> list[EvalScore]:
    """Evaluate the engines that the config names. SIGTERM cancels it.

    scores: a list that gets each score as soon as it is known.
    """
    working = asyncio.current_task()
    assert working is not None, "this runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    cfg = with_server_address(cfg)
    if cfg.client.api != "chat" and (name := cfg.tokenizer.name or cfg.model) is not None:
        fetch(name, has_weights=False)
    async with AsyncExitStack() as stack:
        # Environments first: their errors are reported before an engine is started.
        renderer = None if cfg.client.api == "chat" else build_eval_renderer(cfg)
        beside = open_beside(cfg, stack)
        info = run_info(cfg, renderer, cfg.eval.sampling, cfg.tokenizer.name or cfg.model, beside.models)
        envs = [open_env(env, cfg.run_dir.logs, stack, info) for env in cfg.eval.env]
        for env in envs:
            tasks_of(env, "eval")  # raises if there are none
        stack.enter_context(warn_when_blocked())
        key = await stack.enter_async_context(serve_model(cfg))
        await beside.wait_ready()
        section = cfg.client
        monitors = build_monitors(cfg.monitors, cfg.run_dir, "eval", cfg.run_name, resumed_step=None)
        stack.callback(monitors.close, MONITOR_CLOSE_S)
        version = 0
        if renderer is None:
            chat = await stack.enter_async_context(build_chat(section))
            await chat.wait_ready(section.ready_timeout_s)
            # It has the methods of a renderer that are called where a server renders.
            evaluator = standalone_evaluator(cfg, chat, chat, envs, beside.models)  # type: ignore[arg-type]
        else:
            engines = await stack.enter_async_context(build_engines(section, key))
            await engines.wait_ready(section.ready_timeout_s)
            evaluator = standalone_evaluator(cfg, engines, renderer, envs, beside.models)
            version = await version_of(engines, renderer, cfg.run_name)
        scores = await evaluator.evaluate(version, end=version, scores=scores)
        monitors.log(version, eval_row(scores))
        monitors.log_table(version, "eval/samples", evaluator.examples)
        return scores


async def version_of(engines: EngineClient, renderer: Renderer, run_id: str) -> int:
    """The version that the engines have loaded, read from one sampled token."""
    prompt = renderer.render_prompt([{"role": "user", "content": "?"}], None)
    request = GenerateRequest(request_id=f"{run_id}-version", prompt_ids=prompt, sampling=SamplingParams(max_tokens=1))
    (completion,) = await engines.generate(request)
    return completion.versions[0].version if completion.versions else 0


def with_server_address(cfg: Config) -> Config:
    """The config with the address at which `cfg.model`, if given, will be served.

    Raises: ConfigError for a port that is taken.
    """
    if cfg.model is None:
        return cfg
    server = cfg.inference.server
    port = server.port if "port" in server.model_fields_set else unused_port()
    if not is_free(server.host, port):
        # The server that listens there would be evaluated instead of `model`.
        raise ConfigError(
            f"inference.server.port = {port} is taken by another process on this machine; stop it, give another "
            "port, or remove the key and a free one is found."
        )
    client = cfg.client.model_copy(update={"base_url": f"http://{server.host}:{port}/v1"})
    server = server.model_copy(update={"port": port})
    inference = cfg.inference.model_copy(update={"server": server})
    return cfg.model_copy(update={"client": client, "inference": inference})


@asynccontextmanager
async def serve_model(cfg: EvalConfig) -> AsyncIterator[str | None]:
    """Serve `cfg.model`, if given, at the config's address while the context is open.

    Yields the API key of the engine, which is written to no file.

    Raises: EngineError if the engine ends by itself.
    """
    key = os.environ.get(cfg.client.api_key_var) or None
    if cfg.model is None:
        yield key
        return
    report("phase", text=f"starting an engine for {cfg.model}")
    key = cfg.inference.api_key or key
    section = cfg.inference.model_dump(exclude={"api_key"}) | {"model": cfg.model}
    run = {"output_dir": cfg.output_dir, "run": {"name": cfg.run_name}}
    inference = InferenceConfig.model_validate(section | run)
    path = cfg.run_dir.config("inference")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(inference.model_dump_json(indent=2))
    threads = inference.num_threads or process.num_cores()
    argv = (sys.executable, "-m", "stretto", "inference", "@", str(path))
    engine = process.start(
        "inference", argv, env=process.thread_env(threads) | {KEY_VAR: key or ""}, log=cfg.run_dir.log("inference")
    )
    ending = asyncio.create_task(engine.wait())
    working = asyncio.current_task()
    assert working is not None, "this runs in a task"
    ending.add_done_callback(lambda done: None if done.cancelled() else working.cancel())
    try:
        yield key
    except asyncio.CancelledError:
        if not ending.done() or ending.cancelled():
            raise
        working.uncancel()
        lines = "\n  ".join(engine.tail())
        raise EngineError(
            f"the engine ended ({process.describe_exit(ending.result())}); its last lines:\n  {lines}"
        ) from None
    finally:
        ending.cancel()
        await process.stop([engine], grace_s=5.0)
