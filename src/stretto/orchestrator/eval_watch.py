"""The process `evals` beside an `sft` run: every version that it publishes is loaded into an engine and evaluated.

The trainer writes versions into a directory (transports/weights/filesystem.py) and goes on; here they are taken one
by one, so that an eval is of one version, and none is cancelled. RUN/evals/version_N/results.json says that one is
done. The trainer ends it with a file: END.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import AsyncExitStack
from pathlib import Path

from stretto.base import log
from stretto.base.errors import ConfigError, DataError, EnvError
from stretto.config.roots import EvalsConfig
from stretto.monitors import build_monitors
from stretto.orchestrator.build import build_engines, open_env, run_info
from stretto.orchestrator.eval_verb import MONITOR_CLOSE_S, own_engine, placed, renderer_of
from stretto.orchestrator.evaluate import Evaluator
from stretto.orchestrator.rollout import Player
from stretto.orchestrator.scores import table, write_results
from stretto.orchestrator.telemetry import eval_row
from stretto.records.weights import WeightManifest, load_manifest

logger = logging.getLogger(__name__)

ROLE = "evals"
POLL_S = 0.2
_VERSION = re.compile(r"version_(\d+)$")


def main(cfg: EvalsConfig) -> int:
    """Evaluate what comes until END; the exit status."""
    log.setup(ROLE, cfg.run_dir, cfg.log.level, cfg.log.json_logging)
    asyncio.run(follow(cfg))
    return 0


async def follow(cfg: EvalsConfig) -> None:
    """Every published version, in order."""
    if cfg.model is None:
        raise ConfigError("evals: no model to start an engine for")
    cfg = placed(cfg)
    run_dir = cfg.run_dir
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(own_engine(cfg))
        engines = await stack.enter_async_context(build_engines(cfg.client))
        renderer = renderer_of(cfg)
        about = run_info(cfg, renderer, cfg.eval.sampling, cfg.tokenizer.name or cfg.model)
        envs = [open_env(env, run_dir.logs / "eval", stack, about) for env in cfg.eval.env]
        monitors = build_monitors(cfg.monitors, run_dir, ROLE, cfg.run_name, resumed_step=None)
        stack.callback(monitors.close, MONITOR_CLOSE_S)
        await engines.wait_ready(cfg.client.ready_timeout_s)
        player = Player(
            engine=engines,
            renderer=renderer,
            sampling=cfg.eval.sampling,
            seq_len=cfg.seq_len,
            seed=cfg.seed,
            run_id=cfg.run_name,
            timeout_s=cfg.rollout_timeout_s,
        )
        evaluator = Evaluator(
            envs, cfg.eval, player, max_inflight_rollouts=cfg.max_inflight_rollouts, run_dir=run_dir
        )
        while (manifest := await next_version(cfg)) is not None:
            version = manifest.version
            await engines.update_weights(manifest)
            try:
                scores = await evaluator.evaluate(version, end=cfg.max_steps)
            except (EnvError, ConfigError, DataError) as error:  # an eval is lost, not those that come
                logger.error("no eval of version %d: %s", version, error)
                write_results(run_dir.eval_results(version), [])
                continue
            monitors.log(version, eval_row(scores))
            logger.info("version %d\n%s", version, table(scores))


async def next_version(cfg: EvalsConfig) -> WeightManifest | None:
    """The oldest version that was published and is not evaluated; None when there is none and none will come."""
    while True:
        is_end = cfg.run_dir.evals_end.exists()  # looked at first: what comes before it is then there
        for version, path in published(cfg.watch):
            if not cfg.run_dir.eval_results(version).exists():
                return load_manifest(path)
        if is_end:
            return None
        await asyncio.sleep(POLL_S)


def published(directory: Path) -> list[tuple[int, Path]]:
    """Versions that are there, in order."""
    try:
        found = [
            (int(match[1]), path) for path in directory.iterdir() if (match := _VERSION.match(path.name))
        ]
    except FileNotFoundError:
        return []
    return sorted(found)
