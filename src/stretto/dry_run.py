"""What `--dry-run` shows, on one screen per verb: what was checked, the first task, the processes, where files go.

It starts nothing. check/ looks at models, code and data, orchestrator/dry_run.py makes the first tasks, launch/plan
plans the processes, and this file puts their texts together. The resolved config is shown by `--print-config`.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import addons
from stretto.base import ports, process, rundir
from stretto.base.errors import ConfigError, DataError
from stretto.check.backend import check_trainer_python, find_backend
from stretto.check.checkpoint import check_resumed
from stretto.check.code import Checked, check_sft_records, check_trainer_hooks, check_user_code
from stretto.check.devices import check_sft_devices, check_trained_on_cpu
from stretto.check.models import (
    check_model,
    check_reward_model,
    check_served,
    check_trainable,
    find_model,
    foreign_engines,
    models_of,
)
from stretto.check.weights import check_weights, check_weights_of, check_writes, has_only_config
from stretto.config.changes import changes
from stretto.config.root import (
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    RLConfig,
    RunRoot,
    SFTConfig,
    TrainerConfig,
)
from stretto.config.sections.model import ModelSection
from stretto.config.sections.monitors import MonitorsSection
from stretto.config.sections.trainer import TrainerKeys
from stretto.data.hub_model import find_local, look_up, size
from stretto.launch.launchers import launcher_of
from stretto.launch.plan.beside import engines_beside
from stretto.monitors.purse import Purse, Used, used_by_metrics
from stretto.orchestrator.dry_run import FirstTask, preview, shorter_by_phrases
from stretto.orchestrator.lengths import Limit, limits_of, smallest
from stretto.orchestrator.servers import ask, servers_of
from stretto.orchestrator.state.resume import starting_point, used_before
from stretto.orchestrator.state.run_checkpoint import Progress

if TYPE_CHECKING:
    from stretto.chat.render import Renderer
    from stretto.config.sections.sft import PreferenceData

WIDTH = 118
PROMPT_LINES = 14
MOST_NAMES = 4
COMPARED_ROWS = 4
"""Rows of `sft` in which the same long texts are looked for."""
LOOKED_AT_ROWS = 100
"""Rows of `sft` in which a reply is looked for."""
COUNTED_ROWS = 5000
"""Most rows of `sft` that are rendered to know how many steps its epochs are."""
LONG_ROW = 200  # tokens of a row in which they are worth it

Rows = list[tuple[str, str]]


def rl(cfg: RLConfig) -> str:
    """The screen of `rl`."""
    from stretto.launch.plan.routers import check_router
    from stretto.launch.plan.table import table
    from stretto.launch.run.rl import plan_only

    checked = [*check_user_code(cfg.orchestrator), *check_trainer_hooks(cfg.trainer.hooks)]
    router = check_router(cfg.inference, is_dry_run=True)
    service = _service(cfg)
    plan, directory = plan_only(cfg)
    beside = engines_beside(cfg)
    player = beside.with_names(cfg).orchestrator_config()
    starting_point(player)  # raises: the orchestrator's half of the checkpoint is damaged
    tasks, missing, renderer = preview(player, limits_of(cfg))
    models = [*_model(cfg.model, missing), *_renderer(renderer), *_other_models(cfg), *_weights(cfg)]
    models += [("engine", text) for text in foreign_engines(cfg)]
    rows = [*models, *_environments(tasks), *_code(checked), *_monitors(cfg.monitors, is_fed_here=cfg.ray is None)]
    rows += [*service, *_budget(cfg, lambda: used_before(cfg.run_dir, Progress()))]
    rows += _backend(cfg.trainer, needs_gpu=cfg.trains_here)
    rows += [("router", f"NOT READY: {router}")] if router else []
    rows += _images(cfg.model) if cfg.inference is None else []
    started = beside.sections(cfg).values()
    rows += _servers(player, has_engine=cfg.inference is not None, started=started)
    written = f"{_run_directory(cfg)}\n{_changes(cfg, plan.config)}its configs and commands are in "
    written += f"{directory / 'configs'} and plan.json"
    return _screen(rows, _first_tasks(tasks), table(plan), written, job(cfg))


def _changes(cfg: RLConfig | SFTConfig, resolved: RLConfig | None = None) -> str:
    """The keys of a resumed run that have changed, a line for each; resolved: the config with a plan's choices."""
    if cfg.resume is None or cfg.resume.dir is not None:
        return ""
    changed = changes(cfg.run_dir.config("run"), cfg, resolved)
    return "".join(textwrap.shorten(f"changed: {line}", WIDTH, placeholder=" ...") + "\n" for line in changed)


def _backend(trainer: TrainerKeys, *, needs_gpu: bool) -> Rows:
    """The Python of the trainer's ranks, if it is another, and what the backend needs."""
    try:
        found = check_trainer_python(trainer, needs_gpu=needs_gpu)
    except ConfigError as error:
        return [("backend", f"NOT READY: {error}")]
    return [("backend", found)] if found else []


def _budget(cfg: RLConfig | SFTConfig, used: Callable[[], Used]) -> Rows:
    """The bounds of the run's budget; used: what its earlier starts have used.

    Raises: ConfigError if a run that is resumed has reached one.
    """
    is_resumed = cfg.resume is not None and cfg.resume.dir is None
    purse = Purse(cfg.budget, used() if is_resumed else Used())
    purse.check()
    return [("budget", str(purse))] if purse.has_bounds else []


def _service(cfg: RLConfig) -> Rows:
    """Whether the training service accepts this run.

    Raises: ConfigError with its reason if it does not.
    """
    if cfg.service is None:
        return []
    service = addons.load("stretto.services", "client", "[service]")  # imports aiohttp
    try:
        found = service.check(cfg.trainer_config(), may_exist=cfg.resume is not None or cfg.clean)
    except ConnectionError as error:
        return [("service", f"NOT CHECKED: {error}")]
    lora = cfg.model.lora
    assert lora is not None, "checked with the config"
    state = "" if found["state"] == "new" else f"; it has this run already, {found['state']}"
    user = found["user"]
    return [("service", f"{cfg.service.url} takes an adapter of rank {lora.rank} for user {user}{state}")]


def _servers(cfg: OrchestratorConfig | EvalConfig, *, has_engine: bool, started: Collection[str] = ()) -> Rows:
    """What the servers answer that the run asks and does not start."""
    return [("server", text) for text in ask(servers_of(cfg, has_engine=has_engine, started=started))]


def _images(model: ModelSection) -> Rows:
    """A reminder for engines that this run does not start, if the policy gets images."""
    if model.vlm is None:
        return []
    say = "NOT CHECKED: engines that this run does not start must serve this model with images (`stretto inference`)"
    return [("images", say)]


def orchestrator(cfg: OrchestratorConfig) -> str:
    """The screen of `orchestrator` alone."""
    checked = check_user_code(cfg)
    tasks, missing, renderer = preview(cfg)
    rows = [*_model(cfg.model, missing), *_renderer(renderer), *_environments(tasks), *_code(checked)]
    rows += [*_monitors(cfg.monitors), *_images(cfg.model), *_servers(cfg, has_engine=False)]
    return _screen(rows, _first_tasks(tasks), f"orchestrator  control port {cfg.control.port}", _run_directory(cfg))


def trainer(cfg: TrainerConfig) -> str:
    """The screen of `trainer` alone."""
    if cfg.model.scratch is None and (here := find_model(cfg.model.name)) is not None:
        check_trainable(here, cfg.model.impl, f"[model] name = {cfg.model.name!r}")
        if (backend := find_backend(cfg)) is not None:
            backend.check(here.family, here.found, cfg.model)
    weights = []
    if cfg.model.scratch is None:
        weights = check_weights(cfg.model.name, "[model] name", cfg.model, is_dry_run=True)
    checked = check_trainer_hooks(cfg.hooks)
    rows = [*_model(cfg.model), *_devices(cfg.model), *_weight_rows(weights), *_code(checked)]
    rows += _backend(cfg, needs_gpu=True)
    rows += _monitors(cfg.monitors, is_fed_here=False)  # the orchestrator feeds trackers
    return _screen(
        rows, f"trainer  {_threads(cfg.num_threads)}; batches from port {_batch_port(cfg)}", _run_directory(cfg)
    )


def sft(cfg: SFTConfig) -> str:
    """The screen of `sft`."""
    from stretto.launch.plan.sft_ranks import find_gpus, table

    rundir.check(cfg.run_dir, **cfg.start_options)
    check_resumed(cfg)
    check_model(cfg.model, cfg.num_ranks, "model")
    check_sft_devices(cfg)
    checked = check_sft_records(cfg)
    check_reward_model(cfg)
    example, missing, renderer = _first_example(cfg)
    if not missing:
        _check_epochs(cfg)
    gpus, is_wide = find_gpus(cfg), cfg.deployment.type == "multi_node"
    devices = f"GPU {','.join(gpus)}" if gpus else f"CPU, {_threads(cfg.num_threads)}"
    devices = "the nodes below" if is_wide else devices
    lengths = {"steps": cfg.max_steps, "epochs": cfg.max_epochs}
    budget = _budget(cfg, lambda: used_by_metrics(cfg.run_dir.metrics("sft")))
    length = [f"{count} {unit[: -1 if count == 1 else None]}" for unit, count in lengths.items() if count]
    ranks = f"sft  {cfg.num_ranks} rank{'s' * (cfg.num_ranks != 1)} on {devices}"
    trains = f"trains {' or '.join(length)} of batches of {cfg.batch_size} rows"
    rows = [*_model(cfg.model, missing), *_renderer(renderer), *_weights(cfg)]
    rows += [*_code(checked), *_monitors(cfg.monitors, is_fed_here=cfg.ray is None), *budget]
    nodes = table(cfg) if is_wide else ""
    written = f"{_run_directory(cfg)}\n{_changes(cfg)}".rstrip()
    return _screen(rows, example, f"{ranks}; {trains}", nodes, written, job(cfg))


def evaluate(cfg: EvalConfig) -> str:
    """The screen of `eval`."""
    check_writes(cfg)
    tasks, reason, renderer = preview(cfg)
    missing = None if cfg.client.api == "chat" else reason
    model = _model(ModelSection(name=cfg.model), missing) if cfg.model else []
    unseen = [("prompt", missing)] if missing and not cfg.model else []
    urls = cfg.client.base_url
    served = "an engine of its own, on a free port" if cfg.model else f"engines at {_listed(_urls(urls))}"
    rows = [*model, *unseen, *_renderer(renderer), *_environments(tasks), *_monitors(cfg.monitors)]
    rows += _servers(cfg, has_engine=cfg.model is not None)
    return _screen(rows, _first_tasks(tasks), f"eval  {served}", _run_directory(cfg))


def inference(cfg: InferenceConfig) -> str:
    """The screen of `inference` with one engine."""
    server = cfg.server
    model = _model(ModelSection(name=cfg.model or ModelSection().name))
    if cfg.model:
        is_here = cfg.slurm is None and cfg.ray is None
        check_served(cfg, cfg.model, is_cpu=is_here and not process.visible_gpus())
        model += _weights(cfg)
    engine = f"inference  engine {cfg.engine}, http://{server.host}:{server.port}"
    if launcher_of(cfg) is None and not ports.is_free(server.host, server.port):
        taken = f"server.port = {server.port} is taken on this machine (`ss -ltnp | grep :{server.port}` names by whom)"
        engine += f"\nNOT READY: {taken}; stop that process, or give another port with --server.port"
    return _screen(model, engine, _run_directory(cfg), job(cfg))


def job(cfg: RLConfig | SFTConfig | InferenceConfig) -> str:
    """What the launcher of a cluster would get; "" for a command that runs here."""
    launcher = launcher_of(cfg)
    return "" if launcher is None else launcher.screen(cfg)


def _screen(checked: Rows, *parts: str) -> str:
    rows = [("config", "every key, type and range, and the rules between keys"), *checked]
    width = max(len(name) for name, _ in rows)
    lines, indent = ["dry run, nothing was started. Looked at:"], " " * (width + 4)
    for name, text in rows:
        row = f"  {name:<{width}}  {text}"
        lines += textwrap.wrap(row, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n\n".join(["\n".join(lines), *filter(None, parts)])


# -- rows of what was checked --


def _model(model: ModelSection, missing: str | None = None) -> Rows:
    """The row of a model; missing: why prompts cannot be rendered, "" if they can, None if nothing was rendered.

    A directory with nothing but config.json stands for a model that is elsewhere.

    Raises: ConfigError for a directory that holds no model, or weights without a tokenizer.
    """
    name = model.name
    if model.scratch is not None:
        return [("model", f"made from scratch, {model.scratch.family}")]
    if not Path(name).expanduser().is_dir():
        return [("model", _of_hub(name))]
    if not (Path(name).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"[model] name = {name!r}: there is no config.json in that directory, so it holds no model; "
            f"{rundir.model_near(Path(name))}"
        )
    if missing and has_only_config(name):
        return [("model", f"{name}: its config.json. NOT READY: it has neither tokenizer nor weights here")]
    if missing:
        raise ConfigError(missing)
    return [("model", f"{name}: its config.json" + (" and tokenizer" if missing == "" else ""))]


def _renderer(description: str) -> Rows:
    """By what messages are rendered."""
    return [("renderer", description)] if description else []


def _devices(model: ModelSection) -> Rows:
    """A row if the trainer could not start on this machine, which shows no GPU."""
    if process.visible_gpus():
        return []
    try:
        check_trained_on_cpu(model, "model")
    except ConfigError as error:
        return [("devices", f"NOT READY on this machine: {error}")]
    return []


def _weights(cfg: RLConfig | SFTConfig | InferenceConfig) -> Rows:
    """Rows for what is not right with the files of the models that are here.

    Raises: ConfigError for files with which a run would fail.
    """
    return _weight_rows(check_weights_of(cfg, is_dry_run=True))


def _weight_rows(texts: Sequence[str]) -> Rows:
    return [("weights", text) for text in texts]


def _other_models(cfg: RLConfig) -> Rows:
    """The rows of models that a run loads besides the one that is trained."""
    names = [name for name, _ in models_of(cfg) if name != cfg.model.name]
    keys = {section.model: f"models.{key}" for key, section in cfg.models.items() if section.base_url is None}
    missing = [name for name in names if not Path(name).expanduser().is_dir()]
    return [("model", (f"{keys[name]}: " if name in keys else "") + _of_hub(name)) for name in missing]


def _of_hub(name: str) -> str:
    """Whether a model of the Hub is here, or would be downloaded."""
    if find_local(name) is not None:
        return f"{name}: complete in the local hub cache"
    try:
        offer = look_up(name)
    except ConfigError as error:
        return f"NOT FOUND, which is right only if another run makes it first: {error}"
    room = "" if offer.missing_bytes <= offer.free_bytes else "; NOT READY: that is too little, see HF_HOME"
    return f"{name}: would be downloaded, {offer}, into {offer.cache}, which has {size(offer.free_bytes)} free{room}"


def _environments(tasks: Sequence[FirstTask]) -> Rows:
    names = [task.about.split()[1].rstrip(":") for task in tasks]
    rows = []
    for is_played, what in ((True, ", and one rollout of it played with a dummy reply"), (False, "")):
        made = [name for name, task in zip(names, tasks) if task.is_made and task.is_played == is_played]
        if made:
            rows.append(("environment", f"{_listed(made)}: made, with its first task and prompt{what}"))
    return rows + [("environment", note) for task in tasks for note in task.notes]


def _code(checked: Sequence[Checked]) -> Rows:
    kinds = dict.fromkeys(kind for kind, _ in checked)
    return [(kind, _listed([name for each, name in checked if each == kind])) for kind in kinds]


def _monitors(section: MonitorsSection, *, is_fed_here: bool = True) -> Rows:
    from stretto.monitors.base import find_trackers

    trackers = find_trackers(section, is_fed_here=False)  # logins are looked for below
    rows = [("monitors", f"{_listed(list(trackers))}: installed")] if trackers else []
    for name, tracker in trackers.items():
        if tracker.service and is_fed_here:
            rows.append((tracker.service, _login(tracker.check_login, getattr(section, name))))
    return rows


def _login(check: Callable[[Any], str], section: Any) -> str:
    """The mode of a tracker, or why it would not start on this machine, where its key may be another's."""
    try:
        return check(section)
    except ConfigError as error:
        return f"NOT READY: {error}"


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _urls(urls: str | list[str] | None) -> list[str]:
    return [urls] if isinstance(urls, str) else urls or []


def _threads(count: int | None) -> str:
    return "threads by the size of the model" if count is None else f"{count} thread{'s' * (count != 1)}"


def _batch_port(cfg: TrainerConfig) -> str:
    return str(getattr(cfg.rollout_transport, "port", "none: files"))


# -- what the model gets --


def _first_tasks(tasks: Sequence[FirstTask]) -> str:
    """The first task of the first environment in full; one line for each other environment."""
    shown = [_boxed(task.about, task.prompt) for task in tasks[:1]]
    others = [task.about.rstrip(":") for task in tasks[1 : MOST_NAMES + 1]]
    if len(tasks) > MOST_NAMES + 1:
        others.append(f"and {len(tasks) - MOST_NAMES - 1} environments more")
    return "\n".join([*shown, *(textwrap.shorten(line, WIDTH) for line in others)])


def _boxed(about: str, text: str) -> str:
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, WIDTH - 4) or [""]] if text else []
    if len(lines) > PROMPT_LINES:
        half = PROMPT_LINES // 2
        left_out = f"... {len(lines) - 2 * half} more lines ..."
        lines = [*lines[:half], left_out, *lines[-half:]]
    return "\n".join([about, *(f"  | {line}".rstrip() for line in lines)])


def _first_example(cfg: SFTConfig) -> tuple[str, str, str]:
    """The first row as the model gets it, why it is not rendered ("" if it is), and by what it is."""
    from stretto.config.sections.sft import EnvData, PreferenceData
    from stretto.trainer.batch.sft_data import read_rows, render_row

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
        renderer = _sft_renderer(cfg)
    except (ConfigError, DataError) as error:
        text = "\n".join(f"{message['role']}: {message.get('content')}" for message in row.messages)
        return _boxed(f"{row.where}, not rendered:", text), str(error), ""
    rendered = render_row(row, renderer, cfg.loss_mask)
    if not rendered.examples:
        about = f"{row.where}: not trained: {renderer.name} shows no reply of it as the model would sample it"
        return about, "", renderer.description
    ids, mask, _ = rendered.examples[0]
    parts = f" (the first of {len(rendered.examples)} examples)" if len(rendered.examples) > 1 else ""
    about = f"{row.where}: {len(ids)} tokens, of which {int(mask.sum())} are trained{parts}"
    about += f"{_cut(ids, mask, limits_of(cfg))}:"
    shown = _boxed(about, renderer.readable(ids))
    if cfg.model.scratch is not None and cfg.tokenizer.name is None and len(ids) > LONG_ROW:
        others = [render_row(each, renderer, cfg.loss_mask).examples for each in rows[1:COMPARED_ROWS]]
        shown += shorter_by_phrases(
            [renderer.readable(ids), *(renderer.readable(each[0][0]) for each in others if each)], len(ids)
        )
    return shown, "", renderer.description


def _sft_renderer(cfg: SFTConfig) -> Renderer:
    from stretto.orchestrator.build import build_renderer_of, build_scratch_renderer

    if cfg.model.scratch is not None and cfg.tokenizer.name is None:
        return build_scratch_renderer(cfg.model.scratch, cfg.renderer)
    return build_renderer_of(cfg.model.name, cfg.tokenizer.name, cfg.renderer)


def _check_epochs(cfg: SFTConfig) -> None:
    """Check that the schedule fits into the run's epochs, unless its rows are too many to be rendered now.

    Raises: ConfigError if it does not.
    """
    from stretto.config.sections.sft import PREFERENCE, PreferenceData
    from stretto.trainer.batch.sft_data import check_schedule, find_last_step, load_examples, read_rows

    if cfg.max_epochs is None or cfg.scheduler.type == "constant":
        return
    steps = [getattr(cfg.scheduler, key, 0) for key in ("warmup_steps", "decay_steps")]
    enough = sum(each for each in steps if isinstance(each, int)) * cfg.batch_size // cfg.max_epochs
    most = min(enough, COUNTED_ROWS)
    data, renderer = cfg.data, lambda: _sft_renderer(cfg)
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
    from stretto.config.sections.sft import PREFERENCE, RewardSection

    pairs = addons.load("stretto.sft", "preference.rows", PREFERENCE)
    row = next(itertools.chain.from_iterable(pairs.read_pair_rows(data)), None)
    if row is None:
        raise DataError("[data] has no row; check that what its key names holds rows")
    try:
        renderer = _sft_renderer(cfg)
    except (ConfigError, DataError) as error:
        return _boxed(f"{row.where}, not rendered:", ""), str(error), ""
    is_scored = isinstance(cfg.pair_loss, RewardSection)
    pair = pairs.render_pair(row, renderer, cfg.loss_mask, is_scored=is_scored)
    if isinstance(pair, str):
        return f"{row.where}: left out: its replies {pair}", "", renderer.description
    shown = []
    for name, example in zip(("chosen", "rejected"), pair.replies):
        ids = example.token_ids[:-1] if is_scored else example.token_ids
        trained = f"of which {int(example.is_trained.sum())} are trained"
        counted = "scored at the last" if is_scored else trained
        shown.append(_boxed(f"{row.where}, {name}: {len(ids)} tokens, {counted}:", renderer.readable(ids)))
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


# -- where it goes --


def _run_directory(cfg: RunRoot) -> str:
    fate = "a new run"
    if cfg.resume is not None:
        fate = "a resumed run" if cfg.resume.dir is None else f"a new run from {cfg.resume.dir}"
        if cfg.resume.skip_progress:
            fate += ", whose steps begin at 1"
    elif rundir.is_used(cfg.run_dir):
        fate = "deleted first (--clean)" if cfg.clean else "it has files of an earlier one"
    return f"writes to {cfg.run_path} ({fate})"


SCREENS: dict[str, Callable[..., str]] = {
    "rl": rl,
    "sft": sft,
    "trainer": trainer,
    "orchestrator": orchestrator,
    "inference": inference,
    "eval": evaluate,
    "evals": evaluate,
}
"""By verb of the core."""
