"""The doctor's checks of one config: whether it loads, what would start here, models, code, disk, servers."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from stretto import addons
from stretto.base import rundir
from stretto.base.errors import ConfigError, StrettoError
from stretto.check import nodes as node_checks
from stretto.check.add_ons import check_add_ons
from stretto.check.backend import check_trainer_python
from stretto.check.code import check_user_code
from stretto.check.models import check_model, check_served, check_trainable, models_of
from stretto.check.weights import check_weights_of
from stretto.config.load import load, names_whole_run
from stretto.config.root import EvalConfig, InferenceConfig, RLConfig, SFTConfig
from stretto.config.sections.model import ModelSection
from stretto.config.sections.trainer import CkptSection, num_kept
from stretto.data.hub_model import find_local, look_up, size
from stretto.data.model_file import ModelFile, read_model_file
from stretto.launch.plan.serving import plan_serving
from stretto.launch.run.rl import check_here
from stretto.monitors.base import find_trackers
from stretto.orchestrator.dry_run import preview
from stretto_doctor.finding import Finding, State, bad, good, guarded, note, warn
from stretto_doctor.machine import gib
from stretto_doctor.model_files import check_files, num_parameters
from stretto_doctor.rollouts import check_rollouts

SFT = "stretto.sft"
"""The group of what the verb `sft` offers."""
Config = RLConfig | SFTConfig | InferenceConfig | EvalConfig
ROOTS: dict[str, type[Config]] = {"rl": RLConfig, "sft": SFTConfig, "inference": InferenceConfig, "eval": EvalConfig}
BYTES_PER_PARAMETER = 12
"""A checkpoint of full training has weights and both moments of AdamW in float32."""
BYTES_PER_EXPORTED = 2
CONNECT_TIMEOUT_S = 3.0


def load_config(words: Sequence[str]) -> tuple[str, Config]:
    """The first verb whose config loads from the words, and this config.

    Raises: ConfigError of the verb that knows most of the keys.
    """
    errors = {}
    for verb, root in ROOTS.items():
        try:
            return verb, load(root, list(words), verb=verb)
        except ConfigError as error:
            if verb == "rl" and names_whole_run(words):
                raise  # `inference` would load only its part of the file
            errors[verb] = error
    raise errors[_likeliest(errors)]


def likeliest_root(words: Sequence[str]) -> type[Config]:
    """The root of a config that does not load: that of the verb which knows most of the keys."""
    errors = {}
    for verb, root in ROOTS.items():
        try:
            load(root, list(words), verb=verb)
        except ConfigError as error:
            errors[verb] = error
    return ROOTS[_likeliest(errors) if errors else "rl"]


def _likeliest(errors: Mapping[str, ConfigError]) -> str:
    """The verb that knows most of the keys."""
    return min(errors, key=lambda verb: len(re.findall(r"unknown (?:key|flag|table)", str(errors[verb]))))


def check_fit(cfg: Config) -> str:
    """What this machine would start for a config, as a short text; starts nothing.

    Raises: ConfigError with the first reason why it cannot start.
    """
    check_add_ons(cfg)
    if isinstance(cfg, RLConfig):
        plan = check_here(cfg)
        return f"{len(plan.processes)} processes on {machines(len(plan.hosts) or 1)}; {plan.batch}"
    if isinstance(cfg, SFTConfig):
        ranks = addons.load(SFT, "ranks", "`sft`")
        check_model(cfg.model, cfg.num_ranks, "model")
        addons.load(SFT, "check", "`sft`").check_reward_model(cfg)
        find_trackers(cfg.monitors, is_fed_here=cfg.ray is None)
        if cfg.deployment.type == "multi_node" and cfg.slurm is None and cfg.ray is None:
            hosts, _ = ranks.plan_ranks(cfg)
            node_checks.check_num_gpus(cfg.deployment.gpus_per_node, 0, hosts[0], "deployment.gpus_per_node")
        gpus = ", ".join(ranks.find_gpus(cfg))
        return f"{cfg.num_ranks} ranks on {f'GPU {gpus}' if gpus else 'the CPU, or GPUs of other machines'}"
    if isinstance(cfg, InferenceConfig):
        is_here = cfg.slurm is None and cfg.ray is None
        serving = plan_serving(cfg if is_here else cfg.model_copy(update={"dry_run": True}), cfg.run_dir)
        if cfg.model:
            check_served(cfg, cfg.model, is_cpu=is_here and cfg.device == "cpu")
        return f"{len(serving.processes)} processes on {machines(len(serving.hosts))}"
    preview(cfg)
    return "its environments are made, with their first tasks"


def machines(count: int) -> str:
    """`1 machine`, `2 machines`."""
    return f"{count} machine{'s' * (count != 1)}"


def check_config(cfg: Config) -> Iterator[Finding]:
    """All findings about a config except that of `check_fit`."""
    for name, check in (
        ("run directory", _check_directory),
        ("models", _check_models),
        ("checkpoints", _check_room),
        ("trainer", _check_trainer),
        ("code", _check_code),
        ("rollouts", _check_rollouts),
        ("servers", _check_servers),
    ):
        yield from guarded(name, partial(check, cfg))


def _check_trainer(cfg: Config) -> Iterator[Finding]:
    """The Python of the trainer's ranks, if it is another or has Megatron-Core."""
    if not isinstance(cfg, RLConfig):
        return
    try:
        if found := check_trainer_python(cfg.trainer, needs_gpu=cfg.trains_here):
            yield good("trainer", found)
    except ConfigError as error:
        yield bad("trainer", str(error))


def _check_directory(cfg: Config) -> Iterator[Finding]:
    if isinstance(cfg, InferenceConfig | EvalConfig):
        return
    try:
        rundir.check(cfg.run_dir, **cfg.start_options)
    except ConfigError as error:
        yield bad("run directory", str(error))
        return
    yield good("run directory", f"{cfg.run_path} can be used")


def _models(cfg: Config) -> list[tuple[str, bool]]:
    """Names of models, each with whether its weights are needed."""
    if isinstance(cfg, RLConfig):
        return models_of(cfg)
    if isinstance(cfg, SFTConfig):
        return [] if cfg.model.scratch is not None else [(cfg.model.name, True)]
    return [(cfg.model, True)] if cfg.model else []


def _check_models(cfg: Config) -> Iterator[Finding]:
    found = list(_check_directories(cfg))
    yield from found
    if not any(finding.state is State.BAD for finding in found):
        yield from _check_weights(cfg)


def _check_weights(cfg: Config) -> Iterator[Finding]:
    """Whether names and shapes of weights fit config.json, and tokens the embedding, if a model is here."""
    model = cfg.model
    if isinstance(model, ModelSection) and (directory := find_local(model.name)) is not None:
        try:
            check_trainable(ModelFile.read(directory), model.impl, "")
        except ConfigError:
            return  # `check_fit` says it
    if not any(has_weights and find_local(name) for name, has_weights in _models(cfg)):
        return
    try:
        notes = check_weights_of(cfg)
    except ConfigError as error:
        yield bad("weights", str(error))
        return
    for text in notes:
        yield warn("weights", text)
    if not notes:
        yield good("weights", "names and shapes fit config.json, and every token has a row in the embedding")


def _check_directories(cfg: Config) -> Iterator[Finding]:
    for name, has_weights in _models(cfg):
        directory = find_local(name, has_weights=has_weights)
        if directory is not None and has_weights:
            yield from check_files(name, directory)
            yield from _check_length(cfg, name, directory)
        elif directory is None:
            yield _missing_model(name, has_weights)


def _check_length(cfg: Config, name: str, directory: Path) -> Iterator[Finding]:
    """Whether seq_len is longer than the model's max_position_embeddings."""
    longest = read_model_file(directory).get("max_position_embeddings")
    length = getattr(cfg, "seq_len", None)
    if not isinstance(longest, int) or not isinstance(length, int) or length <= longest:
        return
    text = f"seq_len = {length} is longer than its max_position_embeddings = {longest}"
    reply = cfg.orchestrator.train.sampling.max_completion_tokens if isinstance(cfg, RLConfig) else None
    if isinstance(cfg, SFTConfig):
        yield note(f"model {name}", f"{text}: several examples share a row; longer ones are cut")
    elif reply is not None and reply < longest:
        text = f"{text}: several rollouts share a row, with {reply} tokens per reply"
        yield note(f"model {name}", f"{text}; a longer conversation would be noise")
    else:
        yield warn(f"model {name}", f"{text}: replies beyond that are noise, or refused", f"--seq-len {longest}")


def _missing_model(name: str, has_weights: bool) -> Finding:
    try:
        offer = look_up(name, has_weights=has_weights)
    except ConfigError as error:
        if has_weights:
            fix = "or make it first, if a warm-up (sft) makes it"
            return bad(f"model {name}", str(error), fix)
        fix = "give a directory with tokenizer.json; without tokenizer.name it is the model's own"
        return bad(f"tokenizer {name}", str(error).split("; give ")[0], fix)
    text = f"is not here; would be downloaded, {offer}"
    if offer.missing_bytes > offer.free_bytes:
        fix = f"set HF_HOME to a disk with {size(offer.missing_bytes)} free"
        return bad(f"model {name}", f"{text}, and {offer.cache} has {size(offer.free_bytes)}", fix)
    return note(f"model {name}", text, f"hf download {name} does it beforehand")


def _check_room(cfg: Config) -> Iterator[Finding]:
    """Whether the checkpoints that are kept fit on the disk."""
    if not isinstance(cfg, RLConfig | SFTConfig) or cfg.ckpt is None or cfg.model.scratch is not None:
        return
    directory = find_local(cfg.model.name)
    if directory is None:
        return
    each = _checkpoint_bytes(cfg.model, cfg.ckpt, num_parameters(directory))
    count = num_kept(cfg.ckpt)
    if count is None:
        count = max(1, (cfg.max_steps or 0) // cfg.ckpt.interval) if cfg.ckpt.interval else 1
    there = next(path for path in (cfg.run_path.absolute(), *cfg.run_path.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    # While a checkpoint is written, the ones that are kept are all still there.
    needed = each * (count + 1)
    text = f"up to {count + 1} of {gib(each)} each: {gib(needed)}; {gib(free)} are free"
    if needed > free:
        fits = max(1, int(free // each) - 1) if each <= free / 2 else None
        fix = f"--ckpt.keep-last {fits}" if fits else "--output-dir on a larger disk"
        yield bad("checkpoints", text, fix)
    else:
        yield good("checkpoints", text)


def _checkpoint_bytes(model: ModelSection, ckpt: CkptSection, num: int) -> int:
    """An estimate of a checkpoint's size, with the weights exported beside it; adapters alone are small."""
    exported = BYTES_PER_EXPORTED * num if ckpt.weights is not None else 0
    return exported + (num // 50 if model.lora is not None else BYTES_PER_PARAMETER * num)


def _check_code(cfg: Config) -> Iterator[Finding]:
    found = []
    if isinstance(cfg, RLConfig):
        found = check_user_code(cfg.orchestrator)
    elif isinstance(cfg, SFTConfig):
        found = addons.load(SFT, "check", "`sft`").check_records(cfg)
    if found:
        names = dict.fromkeys(f"{what} {name}" for what, name in found)
        yield good("code and data", ", ".join(names))


def _check_rollouts(cfg: Config) -> Iterator[Finding]:
    if isinstance(cfg, RLConfig):
        name = cfg.tokenizer.name or cfg.model.name
        if cfg.model.scratch is None and find_local(name, has_weights=False) is None:
            yield note("rollouts", f"none was played: the tokenizer of {name} is not here")
            return
        yield from check_rollouts(cfg.orchestrator_config())


def _check_servers(cfg: Config) -> Iterator[Finding]:
    """Whether engines and teachers that this run does not start answer."""
    sections: list[tuple[str, str | list[str] | None]] = []
    if isinstance(cfg, RLConfig):
        if cfg.inference is None:
            sections.append(("orchestrator.client.base_url", cfg.orchestrator.client.base_url))
        if cfg.orchestrator.teacher is not None and cfg.teacher_inference is None:
            sections.append(("orchestrator.teacher.base_url", cfg.orchestrator.teacher.base_url))
    elif isinstance(cfg, EvalConfig) and not cfg.model:
        sections.append(("client.base_url", cfg.client.base_url))
    for key, urls in sections:
        for url in [urls] if isinstance(urls, str) else urls or []:
            yield _server(key, url)


def _server(key: str, url: str) -> Finding:
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    try:
        with socket.create_connection(address, CONNECT_TIMEOUT_S):
            return good(f"server {url}", "answers")
    except OSError as error:
        text = f"{key}: nobody listens there: {error.strerror or error}"
        return bad(f"server {url}", text, "start it, or correct the key")


def why_not(words: Sequence[str]) -> str | None:
    """Why the config of these words cannot run here; None if it can."""
    try:
        check_fit(load_config(words)[1])
    except StrettoError as error:
        return str(error)
    return None
