"""The screen of `sft --dry-run`: what was checked, the first row as the model gets it, ranks, and where files go."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Sized
from typing import Any

from stretto import addons
from stretto.base import rundir
from stretto.base.errors import ConfigError, DataError
from stretto.chat.render import Renderer
from stretto.check.checkpoint import check_resumed
from stretto.check.models import check_model
from stretto.config.root import SFTConfig
from stretto.config.sections.sft import PREFERENCE, EnvData, PreferenceData, RewardSection
from stretto.data.pictures import image_parts
from stretto.dry_run import (
    boxed,
    budget_rows,
    changed_lines,
    code_rows,
    job,
    model_rows,
    monitor_rows,
    renderer_rows,
    run_directory,
    screen,
    threads_text,
    weight_rows,
)
from stretto.monitors.purse import used_by_metrics
from stretto.orchestrator.build import build_renderer_of, build_scratch_renderer
from stretto.orchestrator.dry_run import shorter_by_phrases
from stretto.orchestrator.lengths import Limit, limits_of, smallest
from stretto_sft.check import check_devices, check_records, check_reward_model
from stretto_sft.plan import find_gpus, table
from stretto_sft.rows import check_schedule, find_last_step, load_examples, read_rows, render_row

COMPARED_ROWS = 4
"""Rows in which the same long texts are looked for."""
LOOKED_AT_ROWS = 100
"""Rows in which a reply is looked for, and that are rendered if they have no images."""
COUNTED_ROWS = 5000
"""Most rows that are rendered to know how many steps the epochs are."""
LONG_ROW = 200  # tokens of a row in which they are worth it


def sft_screen(cfg: SFTConfig) -> str:
    """The screen of `sft`."""
    rundir.check(cfg.run_dir, **cfg.start_options)
    check_resumed(cfg)
    check_model(cfg.model, cfg.num_ranks, "model")
    check_devices(cfg)
    checked = check_records(cfg)
    check_reward_model(cfg)
    example, missing, renderer = _first_example(cfg)
    if not missing:
        _check_epochs(cfg)
    gpus, is_wide = find_gpus(cfg), cfg.deployment.type == "multi_node"
    devices = f"GPU {','.join(gpus)}" if gpus else f"CPU, {threads_text(cfg.num_threads)}"
    devices = "the nodes below" if is_wide else devices
    lengths = {"steps": cfg.max_steps, "epochs": cfg.max_epochs}
    budget = budget_rows(cfg, lambda: used_by_metrics(cfg.run_dir.metrics("sft")))
    length = [f"{count} {unit[: -1 if count == 1 else None]}" for unit, count in lengths.items() if count]
    ranks = f"sft  {cfg.num_ranks} rank{'s' * (cfg.num_ranks != 1)} on {devices}"
    trains = f"trains {' or '.join(length)} of batches of {cfg.batch_size} rows"
    rows = [*model_rows(cfg.model, missing), *renderer_rows(renderer), *weight_rows(cfg)]
    rows += [*code_rows(checked), *monitor_rows(cfg.monitors, is_fed_here=cfg.ray is None), *budget]
    nodes = table(cfg) if is_wide else ""
    written = f"{run_directory(cfg)}\n{changed_lines(cfg)}".rstrip()
    return screen(rows, example, f"{ranks}; {trains}", nodes, written, job(cfg))


def _first_example(cfg: SFTConfig) -> tuple[str, str, str]:
    """The first row as the model gets it, why it is not rendered ("" if it is), and by what it is.

    Raises: DataError for one of the first rows that the model cannot take, or if none of them is trained.
    """
    if isinstance(cfg.data, PreferenceData):
        return _first_pair(cfg, cfg.data)
    data = cfg.data.model_copy(update={"num_rows": COMPARED_ROWS}) if isinstance(cfg.data, EnvData) else cfg.data
    rows = list(itertools.islice(read_rows(data, cfg.seed), LOOKED_AT_ROWS))
    roles = [role for role, is_trained in cfg.loss_mask if is_trained]
    row = next((each for each in rows if any(message["role"] in roles for message in each.messages)), None)
    if row is None and rows:
        nor = f", nor has any of the first {len(rows)} rows" if len(rows) > 1 else ""
        raise DataError(
            f"{rows[0].where}: no message of {' or '.join(roles)}, so there is nothing to train on{nor}; add the reply "
            'as {"role": "assistant", "content": "..."}, or as `completion` beside `prompt`'
        )
    if row is None:
        raise DataError("[data] has no row; check what its key names holds rows, or its sft_rows returns them")
    try:
        renderer = _renderer_of(cfg)
    except (ConfigError, DataError) as error:
        text = "\n".join(f"{message['role']}: {message.get('content')}" for message in row.messages)
        return boxed(f"{row.where}, not rendered:", text), str(error), ""
    rows = [each for each in rows if each is row or not any(image_parts(each.messages))]  # pictures take long
    found = [render_row(each, renderer, cfg.loss_mask) for each in rows]
    rendered = found[rows.index(row)]
    if not any(each.examples for each in found):
        nor = f"; nor is any of the first {len(rows)} rows trained" if len(rows) > 1 else ""
        raise DataError(f"{row.where}: not trained: {rendered.why}{nor}")
    if not rendered.examples:
        return f"{row.where}: not trained: {rendered.why}", "", renderer.description
    ids, mask, _ = rendered.examples[0]
    parts = f" (the first of {len(rendered.examples)} examples)" if len(rendered.examples) > 1 else ""
    about = f"{row.where}: {len(ids)} tokens, of which {int(mask.sum())} are trained{parts}"
    about += f"{_cut(ids, mask, limits_of(cfg))}:"
    shown = boxed(about, renderer.readable(ids))
    if parts and renderer.branching:
        shown += f"\nNOTE: {renderer.branching}"
    if num_left_out := sum(each.num_left_out for each in found):
        where, why = next((each.where, about.why) for each, about in zip(rows, found) if about.num_left_out)
        many = f"{num_left_out} replies" if num_left_out > 1 else "a reply"
        shown += f"\nNOTE: {many} of the first {len(rows)} rows will not be trained; {where}: {why}"
    if cfg.model.scratch is not None and cfg.tokenizer.name is None and len(ids) > LONG_ROW:
        others = [each.examples for each in found[1:COMPARED_ROWS]]
        shown += shorter_by_phrases(
            [renderer.readable(ids), *(renderer.readable(each[0][0]) for each in others if each)], len(ids)
        )
    return shown, "", renderer.description


def _renderer_of(cfg: SFTConfig) -> Renderer:
    if cfg.model.scratch is not None and cfg.tokenizer.name is None:
        return build_scratch_renderer(cfg.model.scratch, cfg.renderer)
    return build_renderer_of(cfg.model.name, cfg.tokenizer.name, cfg.renderer)


def _check_epochs(cfg: SFTConfig) -> None:
    """Check that the schedule fits into the run's epochs, unless its rows are too many to be rendered now.

    Raises: ConfigError if it does not.
    """
    if cfg.max_epochs is None or cfg.scheduler.type == "constant":
        return
    steps = [getattr(cfg.scheduler, key, 0) for key in ("warmup_steps", "decay_steps")]
    enough = sum(each for each in steps if isinstance(each, int)) * cfg.batch_size // cfg.max_epochs
    most = min(enough, COUNTED_ROWS)
    data, renderer = cfg.data, lambda: _renderer_of(cfg)
    rows: Iterable[object]
    if isinstance(data, PreferenceData):
        pairs = addons.load("stretto.sft", "preference.rows", PREFERENCE)
        rows = itertools.chain.from_iterable(pairs.read_pair_rows(data))
        load = lambda: pairs.load_rows(cfg, data, renderer(), cfg.seq_len, "seq_len")
    else:
        rows = read_rows(data, cfg.seed)
        load = lambda: load_examples(data, renderer(), cfg.loss_mask, cfg.seq_len, cfg.seed)
    if sum(1 for _ in itertools.islice(rows, most + 1)) > most:
        return
    count = len(load())
    check_schedule(cfg, count, find_last_step(cfg, count))


def _first_pair(cfg: SFTConfig, data: PreferenceData) -> tuple[str, str, str]:
    """The first pair as the model gets it, why it is not rendered ("" if it is), and by what it is."""
    pairs = addons.load("stretto.sft", "preference.rows", PREFERENCE)
    row = next(itertools.chain.from_iterable(pairs.read_pair_rows(data)), None)
    if row is None:
        raise DataError("[data] has no row; check that what its key names holds rows")
    try:
        renderer = _renderer_of(cfg)
    except (ConfigError, DataError) as error:
        return boxed(f"{row.where}, not rendered:", ""), str(error), ""
    is_scored = isinstance(cfg.pair_loss, RewardSection)
    pair = pairs.render_pair(row, renderer, cfg.loss_mask, is_scored=is_scored)
    if isinstance(pair, str):
        return f"{row.where}: left out: its replies {pair}", "", renderer.description
    shown = []
    for name, example in zip(("chosen", "rejected"), pair.replies):
        ids = example.token_ids[:-1] if is_scored else example.token_ids
        trained = f"of which {int(example.is_trained.sum())} are trained"
        counted = "scored at the last" if is_scored else trained
        shown.append(boxed(f"{row.where}, {name}: {len(ids)} tokens, {counted}:", renderer.readable(ids)))
    most = min(smallest(limits_of(cfg)).tokens, pairs.tokens_per_reply(cfg.seq_len, is_scored=is_scored))
    if any(len(example.token_ids) - is_scored > most for example in pair.replies):
        cut = pairs.cut_pair(pair, renderer, most, is_scored=is_scored)
        fate = "it is left out" if isinstance(cut, str) else "it is cut"
        shown.append(f"NOTE: a row holds both replies, so each has at most {most} tokens: {fate}; raise seq_len")
    return "\n".join(shown), "", renderer.description


def _cut(ids: Sized, mask: Any, limits: Sequence[Limit]) -> str:
    """What a limit leaves of a row that is longer."""
    limit = smallest(limits)
    if len(ids) <= limit.tokens:
        return ""
    left = int(mask[: limit.tokens].sum())
    fate = f"it is cut, and {left} are trained" if left else "nothing of it is trained"
    return f"; with {limit} {fate} (raise that key, or shorten the row)"
