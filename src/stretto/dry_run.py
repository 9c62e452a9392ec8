"""What `--dry-run` shows, on one screen per verb: what was checked, the first task, the processes, where files go.

It starts nothing. check/ looks at models, code and data, orchestrator/dry_run.py makes the first tasks, launch/plan
plans the processes, and this file puts their texts together. The resolved config is shown by `--print-config`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from stretto import addons
from stretto.base import ports, process, rundir
from stretto.base.errors import ConfigError
from stretto.check.backend import check_trainer_python, find_backend
from stretto.check.code import Checked, check_trainer_hooks, check_user_code
from stretto.check.devices import check_trained_on_cpu
from stretto.check.models import check_served, check_trainable, find_model, foreign_engines, key_of, models_of
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
from stretto.monitors.purse import Purse, Used
from stretto.orchestrator.dry_run import FirstTask, listens, preview
from stretto.orchestrator.lengths import limits_of
from stretto.orchestrator.servers import ask, servers_of
from stretto.orchestrator.state.resume import starting_point, used_before
from stretto.orchestrator.state.run_checkpoint import Progress

WIDTH = 118
PROMPT_LINES = 14
MOST_NAMES = 4

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
    models = [*model_rows(cfg.model, missing), *renderer_rows(renderer), *_other_models(cfg), *weight_rows(cfg)]
    models += [("engine", text) for text in foreign_engines(cfg)]
    rows = [*models, *_environments(tasks), *code_rows(checked)]
    rows += [*monitor_rows(cfg.monitors, is_fed_here=cfg.ray is None), *service]
    rows += [*budget_rows(cfg, lambda: used_before(cfg.run_dir, Progress()))]
    rows += _backend(cfg.trainer, needs_gpu=cfg.trains_here)
    rows += [("router", f"NOT READY: {router}")] if router else []
    rows += _images(cfg.model) if cfg.inference is None else []
    started = beside.sections(cfg).values()
    rows += _servers(player, has_engine=cfg.inference is not None, started=started)
    written = f"{run_directory(cfg)}\n{changed_lines(cfg, plan.config)}its configs and commands are in "
    written += f"{directory / 'configs'} and plan.json"
    return screen(rows, _first_tasks(tasks), table(plan), written, job(cfg))


def changed_lines(cfg: RLConfig | SFTConfig, resolved: RLConfig | None = None) -> str:
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


def budget_rows(cfg: RLConfig | SFTConfig, used: Callable[[], Used]) -> Rows:
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
    rows = [*model_rows(cfg.model, missing), *renderer_rows(renderer), *_environments(tasks), *code_rows(checked)]
    rows += [*monitor_rows(cfg.monitors), *_images(cfg.model), *_servers(cfg, has_engine=False)]
    return screen(rows, _first_tasks(tasks), listens(cfg), run_directory(cfg))


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
    rows = [*model_rows(cfg.model), *_devices(cfg.model), *_rows_of_weights(weights), *code_rows(checked)]
    rows += _backend(cfg, needs_gpu=True)
    rows += monitor_rows(cfg.monitors, is_fed_here=False)  # the orchestrator feeds trackers
    port = getattr(cfg.rollout_transport, "port", "none: files")
    return screen(rows, f"trainer  {threads_text(cfg.num_threads)}; batches from port {port}", run_directory(cfg))


def evaluate(cfg: EvalConfig) -> str:
    """The screen of `eval`."""
    check_writes(cfg)
    tasks, reason, renderer = preview(cfg)
    missing = None if cfg.client.api == "chat" else reason
    model = model_rows(ModelSection(name=cfg.model), missing) if cfg.model else []
    unseen = [("prompt", missing)] if missing and not cfg.model else []
    urls = cfg.client.base_url
    served = "an engine of its own, on a free port" if cfg.model else f"engines at {_listed(_urls(urls))}"
    rows = [*model, *unseen, *renderer_rows(renderer), *_environments(tasks), *monitor_rows(cfg.monitors)]
    rows += _servers(cfg, has_engine=cfg.model is not None)
    return screen(rows, _first_tasks(tasks), f"eval  {served}", run_directory(cfg))


def inference(cfg: InferenceConfig) -> str:
    """The screen of `inference`."""
    from stretto.launch.run import serve

    processes = serve.planned(cfg) if serve.has_several(cfg) else cfg
    model = model_rows(ModelSection(name=cfg.model or ModelSection().name))
    if cfg.model:
        is_here = launcher_of(cfg) is None and cfg.deployment.num_nodes == 1
        check_served(cfg, cfg.model, is_cpu=is_here and not process.visible_gpus())
        model += weight_rows(cfg)
    shown = processes if isinstance(processes, str) else _engine(processes, is_here=launcher_of(cfg) is None)
    return screen(model, shown, run_directory(cfg), job(cfg))


def _engine(cfg: InferenceConfig, *, is_here: bool) -> str:
    """Where a single engine would listen."""
    server = cfg.server
    engine = f"inference  engine {cfg.engine}, http://{server.host}:{server.port}"
    if is_here and not ports.is_free(server.host, server.port):
        taken = ports.taken_text("server.port", server.port)
        engine += f"\nNOT READY: {taken}; stop that process, or give another port with --server.port"
    return engine


def job(cfg: RLConfig | SFTConfig | InferenceConfig) -> str:
    """What the launcher of a cluster would get; "" for a command that runs here."""
    launcher = launcher_of(cfg)
    return "" if launcher is None else launcher.screen(cfg)


def screen(checked: Rows, *parts: str) -> str:
    rows = [("config", "every key, type and range, and the rules between keys"), *checked]
    width = max(len(name) for name, _ in rows)
    lines, indent = ["dry run, nothing was started. Looked at:"], " " * (width + 4)
    for name, text in rows:
        row = f"  {name:<{width}}  {text}"
        lines += textwrap.wrap(row, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n\n".join(["\n".join(lines), *filter(None, parts)])


# -- rows of what was checked --


def model_rows(model: ModelSection, missing: str | None = None) -> Rows:
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


def renderer_rows(description: str) -> Rows:
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


def weight_rows(cfg: RLConfig | SFTConfig | InferenceConfig) -> Rows:
    """Rows for what is not right with the files of the models that are here.

    Raises: ConfigError for files with which a run would fail.
    """
    return _rows_of_weights(check_weights_of(cfg, is_dry_run=True))


def _rows_of_weights(texts: Sequence[str]) -> Rows:
    return [("weights", text) for text in texts]


def _other_models(cfg: RLConfig) -> Rows:
    """The rows of models that a run loads besides the one that is trained."""
    names = [name for name, _ in models_of(cfg) if name != cfg.model.name]
    missing = [name for name in names if not Path(name).expanduser().is_dir()]
    return [("model", key_of(cfg, name) + _of_hub(name)) for name in missing]


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


def code_rows(checked: Sequence[Checked]) -> Rows:
    kinds = dict.fromkeys(kind for kind, _ in checked)
    return [(kind, _listed([name for each, name in checked if each == kind])) for kind in kinds]


def monitor_rows(section: MonitorsSection, *, is_fed_here: bool = True) -> Rows:
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


def threads_text(count: int | None) -> str:
    return "threads by the size of the model" if count is None else f"{count} thread{'s' * (count != 1)}"


# -- what the model gets --


def _first_tasks(tasks: Sequence[FirstTask]) -> str:
    """The first task of the first environment in full; one line for each other environment."""
    shown = [boxed(task.about, task.prompt) for task in tasks[:1]]
    others = [task.about.rstrip(":") for task in tasks[1 : MOST_NAMES + 1]]
    if len(tasks) > MOST_NAMES + 1:
        others.append(f"and {len(tasks) - MOST_NAMES - 1} environments more")
    return "\n".join([*shown, *(textwrap.shorten(line, WIDTH) for line in others)])


def boxed(about: str, text: str) -> str:
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, WIDTH - 4) or [""]] if text else []
    if len(lines) > PROMPT_LINES:
        half = PROMPT_LINES // 2
        left_out = f"... {len(lines) - 2 * half} more lines ..."
        lines = [*lines[:half], left_out, *lines[-half:]]
    return "\n".join([about, *(f"  | {line}".rstrip() for line in lines)])


# -- where it goes --


def run_directory(cfg: RunRoot) -> str:
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
    "trainer": trainer,
    "orchestrator": orchestrator,
    "inference": inference,
    "eval": evaluate,
}
"""By verb of the core."""
