"""Lengths of a config's own prompts and examples: the first of each are rendered, as a dry run does.

Needs the tokenizer here, and the environment or the data; nothing is downloaded for it. For what cannot be had there is
a reason instead, and the plan then assumes something.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from pathlib import Path

from stretto.base.errors import StrettoError
from stretto.config.root import OrchestratorConfig, RLConfig, SFTConfig
from stretto.config.sections.orchestrator import EnvSection
from stretto.config.sections.sft import EnvData, FileData
from stretto.data.hub_model import find_local, is_hub_name
from stretto.envs.base import RunInfo, needs_worker, tasks_of
from stretto.foresee.workload import Numbers

NUM_PROMPTS, NUM_EXAMPLES = 64, 512


def prompt_lengths(cfg: RLConfig) -> Numbers | str:
    """Tokens of the first prompts of all environments; or why they are not known."""
    from stretto.orchestrator.build import build_policy_renderer, run_info

    if reason := _no_tokenizer(cfg):
        return reason
    own, found = cfg.orchestrator_config(), []
    try:
        renderer = build_policy_renderer(own)
        info = run_info(own, renderer, own.train.sampling, cfg.tokenizer.name or cfg.model.name)
        for section in own.env:
            if section.num_workers or needs_worker(section.id):
                return f"environment {section.name or section.id} runs in processes of its own"
            lengths = asyncio.run(_prompts_of(own, section, renderer, info))
            if isinstance(lengths, str):
                return lengths
            found += lengths
    except StrettoError as error:
        return str(error)
    return Numbers(values=tuple(found))


async def _prompts_of(
    cfg: OrchestratorConfig, section: EnvSection, renderer: object, info: RunInfo
) -> list[float] | str:
    from stretto.orchestrator.build import open_env
    from stretto.orchestrator.dry_run import first_prompt

    async with AsyncExitStack() as stack:
        env = open_env(section, Path(), stack, info)
        source = tasks_of(env, "train")
        lengths = []
        for index in range(min(NUM_PROMPTS, source.num_tasks or NUM_PROMPTS)):
            task = source.task(index)
            prompt, tools = await first_prompt(
                env, task, f"environment {env.name}, task {task.task_id}, prompt"
            )
            if prompt is None:
                return f"environment {env.name} makes its prompts while they are played"
            ids = (
                renderer.encode(prompt) if isinstance(prompt, str) else renderer.render_prompt(prompt, tools)
            )
            lengths.append(float(len(ids)))
        return lengths


def example_lengths(cfg: SFTConfig) -> Numbers | str:
    """Tokens of the first examples, cut at seq_len; or why they are not known."""
    from stretto.orchestrator.build import build_renderer_of, build_scratch_renderer
    from stretto.trainer.batch.sft_data import read_rows, render_row

    if reason := _no_tokenizer(cfg):
        return reason
    data = cfg.data
    if isinstance(data, FileData) and is_hub_name(data.name) and not Path(data.name).exists():
        return f"{data.name} is a data set of the Hub, which a plan does not download"
    if isinstance(data, EnvData):
        data = data.model_copy(update={"num_rows": min(data.num_rows, NUM_EXAMPLES)})
    try:
        if cfg.model.scratch is not None and cfg.tokenizer.name is None:
            renderer = build_scratch_renderer(cfg.model.scratch, cfg.renderer)
        else:
            renderer = build_renderer_of(cfg.model.name, cfg.tokenizer.name, cfg.renderer)
        rows = itertools.islice(read_rows(data, cfg.seed), NUM_EXAMPLES)
        lengths = [len(render_row(row, renderer, cfg.loss_mask)[0]) for row in rows]
    except StrettoError as error:
        return str(error)
    return (
        Numbers(values=tuple(float(min(length, cfg.seq_len)) for length in lengths)) if lengths else "no rows"
    )


def _no_tokenizer(cfg: RLConfig | SFTConfig) -> str:
    """Why there is no tokenizer here; "" if there is one."""
    name = cfg.tokenizer.name or cfg.model.name
    if cfg.model.scratch is not None and cfg.tokenizer.name is None:
        return ""
    return "" if find_local(name, has_weights=False) is not None else f"the tokenizer of {name} is not here"
