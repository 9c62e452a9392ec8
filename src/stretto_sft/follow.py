"""The process `evals` beside an `sft` run: evaluates every published version.

The trainer writes versions into a directory (transports/weights/filesystem.py) and continues. This process loads them
into an engine one by one, so that each eval is of one version; no eval is cancelled.
RUN/evals/version_N/results.json marks an eval as done. The trainer ends the process by writing the file END.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import AsyncExitStack
from pathlib import Path

from stretto.base import log
from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.base.files import read_rows
from stretto.base.foreign import warn_when_blocked
from stretto.config.root import EvalsConfig
from stretto.monitors.base import MONITOR_CLOSE_S, build_monitors
from stretto.orchestrator.build import build_eval_renderer, open_env, run_info
from stretto.orchestrator.clients import build_engines
from stretto.orchestrator.eval.evaluator import standalone_evaluator
from stretto.orchestrator.eval.results import format_table, write_results
from stretto.orchestrator.eval.verb import serve_model, with_server_address
from stretto.orchestrator.eval_scores import eval_row
from stretto.records.weight_manifest import WeightManifest, load_manifest

logger = logging.getLogger(__name__)

ROLE = "evals"
POLL_S = 0.2
_VERSION = re.compile(r"version_(\d+)$")


def main(cfg: EvalsConfig) -> int:
    """Evaluate published versions until END; returns the exit status."""
    log.setup(ROLE, cfg.run_dir, cfg.log.level, cfg.log.json_logging)
    asyncio.run(follow(cfg))
    return 0


async def follow(cfg: EvalsConfig) -> None:
    """Evaluate every published version, in order."""
    if cfg.model is None:
        raise ConfigError("evals: no model to start an engine for")
    cfg = with_server_address(cfg)
    run_dir = cfg.run_dir
    async with AsyncExitStack() as stack:
        key = await stack.enter_async_context(serve_model(cfg))
        engines = await stack.enter_async_context(build_engines(cfg.client, key))
        renderer = build_eval_renderer(cfg)
        info = run_info(cfg, renderer, cfg.eval.sampling, cfg.tokenizer.name or cfg.model)
        envs = [open_env(env, run_dir.logs / "eval", stack, info) for env in cfg.eval.env]
        monitors = build_monitors(cfg.monitors, run_dir, ROLE, cfg.run_name, resumed_step=None)
        stack.callback(monitors.close, MONITOR_CLOSE_S)
        await engines.wait_ready(cfg.client.ready_timeout_s)
        stack.enter_context(warn_when_blocked())
        evaluator = standalone_evaluator(cfg, engines, renderer, envs)
        while (manifest := await next_version(cfg)) is not None:
            version = manifest.version
            await engines.update_weights(manifest)
            try:
                scores = await evaluator.evaluate(version, end=cfg.max_steps)
            except (EnvError, ConfigError, DataError) as error:  # this eval is lost, later ones are not
                logger.error("no eval of version %d: %s", version, error)
                write_results(run_dir.eval_results(version), [])
                continue
            monitors.log(version, eval_row(scores))
            monitors.log_table(version, "eval/samples", evaluator.examples)
            logger.info("version %d\n%s", version, format_table(scores))


async def next_version(cfg: EvalsConfig) -> WeightManifest | None:
    """Wait for the oldest published version that is not evaluated; None after the last one."""
    while True:
        is_end = cfg.run_dir.evals_end.exists()  # read first, so that no version before it is missed
        for version, path in published_versions(cfg.watch):
            if read_rows(cfg.run_dir.eval_results(version)) is None:
                return load_manifest(path)
        if is_end:
            return None
        await asyncio.sleep(POLL_S)


def published_versions(directory: Path) -> list[tuple[int, Path]]:
    """Published versions and their manifests, in order."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((int(match[1]), path) for path in paths if (match := _VERSION.match(path.name)))
