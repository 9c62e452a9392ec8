"""The batches of a run as they were, for a trainer that learns from them again, and a step of a run as one file."""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
import json
import shutil
import sqlite3
import tarfile
import tempfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.files import atomic_path
from stretto.base.paths import RunDir
from stretto.config.masks import is_secret
from stretto.envs.base import SingleTurnEnv, Split, TaskSource
from stretto.ledger.reader import LedgerReader
from stretto.monitors.file import read_metrics
from stretto.records.rollout import Group, Task
from stretto.vime import RecordedBatch
from stretto_python.run import Run

REPLAYED = "replayed"
ENVIRONMENT = "stretto_review.recorded:Recorded"
FUNCTION = "stretto_review.recorded:batch_of_step"
SUFFIX = ".bundle"
PORTS = frozenset({"port", "router_port", "backend_port"})
READ_BYTES = 1 << 20
ANY_AGE = 1_000_000
"""Steps that no rollout is older than: none is dropped for its age once more."""
UNPACKED = "bundle.sha256"
"""File of an unpacked bundle: which bundle it was."""
MODELS = "models.json"
"""File of a bundle: the keys that name its models, each with the model's place in the bundle."""
MODEL_KEYS = ("model.name", "tokenizer.name", "trainer.loss.reference_kl.model", "trainer.advantages.kl_model")
OTHER_FORMATS = frozenset({".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Weights that a directory has beside those that are read."""
LEFT_OUT = {
    "": ("teacher_inference", "colocate", "deployment", "slurm", "ray", "service", "clean", "resume"),
    "orchestrator": (
        "client", "eval", "batch_order", "oversampling_factor", "max_inflight_rollouts", "max_oversampling",
        "concurrency", "partial_rollout", "mask_offpolicy_in_partial_rollout", "tasks_per_minute",
        "token_batch_size", "steering", "sync_interval",
    ),
}  # fmt: skip
"""Keys that say who plays rollouts and when, which nobody does where recorded ones are trained on."""
PRUNED = (
    "DELETE FROM batches WHERE step != :step OR state = 'undone'",
    "DELETE FROM batch_rollouts WHERE batch NOT IN (SELECT batch FROM batches)",
    "DELETE FROM rollouts WHERE group_id NOT IN (SELECT group_id FROM live_rollouts)",
    "DELETE FROM draws WHERE group_id NOT IN (SELECT group_id FROM rollouts)",
    "DELETE FROM checkpoints WHERE step != :step - 1",
    "DELETE FROM events WHERE kind != 'weights'",
)


class Recorded(SingleTurnEnv):
    """Stands for an environment whose rollouts are there already: nothing of it is played."""

    name = "recorded"

    def tasks(self, split: Split) -> TaskSource:
        return TaskSource(lambda index: Task(env=self.name, task_id=f"{split}-{index}", data={}))

    def prompt(self, task: Task) -> str:
        return "It has been played."

    def score(self, task: Task, text: str) -> float:
        return 0.0


async def batch_of_step(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RecordedBatch:
    """The groups that step `rollout_id + 1` of the run `args.replayed` was trained on, as they were recorded.

    After the last recorded step it waits, until the run is stopped. Raises: DataError if tokens are no longer kept.
    """
    groups = await asyncio.to_thread(_groups_of, Run(args.replayed).dir, rollout_id + 1)
    if not groups:
        await asyncio.Event().wait()
    return RecordedBatch(samples=groups)


def _groups_of(run: RunDir, step: int) -> list[Group]:
    with LedgerReader(run) as ledger:
        return [ledger.group(number) for number in groups_at(ledger, step)]


def without_ports(config: dict[str, Any]) -> dict[str, Any]:
    """The data of a resolved config without the ports that its launcher found: others may listen there by now."""
    data: dict[str, Any] = json.loads(json.dumps(config))
    for name in ("control", "rollout_transport", "weight_broadcast", "teacher_inference", "inference"):
        _drop(PORTS, data.get(name))
    _drop(PORTS, (data.get("trainer") or {}).get("critic"))
    teacher, engine = data.get("teacher_inference") or {}, data.get("inference") or {}
    if teacher:
        (data["orchestrator"].get("teacher") or {}).pop("base_url", None)
    if engine:
        (data["orchestrator"].get("client") or {}).pop("base_url", None)
        if (server := engine.get("server") or {}).get("host") == "127.0.0.1":
            del server["host"]  # the default: where it is given, the address follows from it
    return data


def _drop(names: frozenset[str], data: Any) -> None:
    """Drop keys of these names at any depth."""
    for key, value in list(data.items()) if isinstance(data, dict) else ():
        if key in names:
            del data[key]
        else:
            _drop(names, value)


def as_training(config: dict[str, Any], run: Path) -> dict[str, Any]:
    """The data of a run's config for training alone, on the batches that the run has recorded."""
    data = {key: value for key, value in config.items() if key not in LEFT_OUT[""]}
    section = {key: value for key, value in data["orchestrator"].items() if key not in LEFT_OUT["orchestrator"]}
    hooks = section.get("hooks") or {}
    function = {
        "rollout_function": FUNCTION,
        "eval_function": None,
        "dynamic_sampling_filter": None,  # it has kept what is recorded, and may answer otherwise the second time
        "args": hooks.get("args", {}) | {REPLAYED: str(run)},
    }
    played = ("sampling", "group_size")  # recorded groups have them
    envs = [{key: value for key, value in env.items() if key not in played} for env in section["env"]]
    section |= {"env": envs, "hooks": hooks | function, "debug": "training", "filter_zero_advantages": False}
    section |= {"max_off_policy_steps": ANY_AGE}
    return data | {"orchestrator": section, "inference": None, "deterministic": False}


def played(sections: list[dict[str, Any]], run: RunDir) -> list[dict[str, Any]]:
    """Environments of which nothing but name and algorithm is asked: neither their code nor their data need be there.

    One whose name only its code knows, and not the run's ledger, stays what it was.
    """
    names = [each.get("name") or (None if ":" in each["id"] else each["id"]) for each in sections]
    if names.count(None) == 1 and run.ledger.exists():
        with LedgerReader(run) as ledger:
            others = {row["env"] for row in ledger.rows("SELECT DISTINCT env FROM draws")} - set(names)
        if len(others) == 1:
            names[names.index(None)] = others.pop()
    found = []
    for name, each in zip(names, sections):
        kept = ("id", "args", "name", "algo", "ratio", "num_workers") if name is None else ("algo", "ratio")
        section = {key: each[key] for key in kept if key in each}
        found.append(section if name is None else section | {"id": ENVIRONMENT, "name": name})
    return found


def with_models(config: dict[str, Any], run: Path) -> dict[str, Any]:
    """The data of a bundle's config, by the models that the bundle has; of any other run as it is."""
    data: dict[str, Any] = json.loads(json.dumps(config))
    places = json.loads((run / MODELS).read_text()) if (run / MODELS).is_file() else {}
    for key, place in places.items():
        *above, last = key.split(".")
        functools.reduce(lambda section, name: section[name], above, data)[last] = str(run.absolute() / place)
    return data


def _models_of(config: dict[str, Any]) -> dict[str, Path]:
    """The keys of a config that name a directory of a model, with the directory."""
    found = {}
    for key in MODEL_KEYS:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, str) and (directory := Path(value).expanduser()).is_dir():
            found[key] = directory.resolve()
    return found


def _add_models(archive: tarfile.TarFile, part: RunDir, models: dict[str, Path]) -> None:
    """Add the files of models, but hidden ones; those of the policy's tokenizer also where a run has one of its own."""
    numbers = {directory: number for number, directory in enumerate(dict.fromkeys(models.values()))}
    places = {key: f"models/{numbers[directory]}" for key, directory in models.items()}
    (part.path / MODELS).write_text(json.dumps(places))
    archive.add(part.path / MODELS, f"{part.path.name}/{MODELS}")
    for directory, number in numbers.items():
        for file in sorted(directory.iterdir()):
            if file.is_file() and file.suffix not in OTHER_FORMATS and not file.name.startswith("."):
                archive.add(file.resolve(), f"{part.path.name}/models/{number}/{file.name}")
    speaker = models.get("tokenizer.name") or models.get("model.name")
    if speaker is not None and not part.tokenizer.exists():
        for file in (each for each in speaker.iterdir() if each.is_file() and each.suffix in (".json", ".jinja")):
            archive.add(file.resolve(), f"{part.path.name}/{part.tokenizer.name}/{file.name}")


def groups_at(ledger: LedgerReader, step: int) -> list[int]:
    """The draws that make the batch of a step, in its order."""
    return list(dict.fromkeys(row["group_id"] for row in ledger.trained_rollouts(step)))


def write_bundle(run: Run, step: int, out: Path | None) -> Path:
    """Write a step as a file: models, the checkpoint before it, its batch, the configuration, and what it came to.

    Raises: ConfigError if there is no such step or checkpoint, or tokens are no longer kept.
    """
    here = run.dir
    with LedgerReader(here) as ledger:
        numbers = groups_at(ledger, step)
        if not numbers:
            raise ConfigError(f"stretto replay: --bundle {step}: {here} has trained no such step")
        for number in numbers:
            ledger.group(number)  # raises if its tokens are not kept
        if step > 1 and step - 1 not in (known := here.complete_checkpoints()):
            begin = [1, *(each + 1 for each in known if groups_at(ledger, each + 1))]
            raise ConfigError(
                f"stretto replay: --bundle {step}: {here} has no checkpoint of step {step - 1}; it can make bundles of "
                f"the steps {', '.join(map(str, begin))}"
            )
    path = out or here.path / "exports" / f"step_{step}{SUFFIX}"
    make_parent(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        part = RunDir(Path(scratch) / f"{here.path.name}-step-{step}")
        part.configs.mkdir(parents=True)
        part.config("run").write_text(json.dumps(without_secrets(run.config), indent=2) + "\n")
        for file in (here.clock, here.tokenizer):
            if file.exists():
                (shutil.copytree if file.is_dir() else shutil.copy2)(file, part.path / file.name)
        if step > 1:
            shutil.copytree(here.checkpoint(step - 1), part.checkpoint(step - 1))
        if here.weights_step(step).is_dir():
            shutil.copytree(here.weights_step(step), part.weights_step(step))
        for role in ("trainer", "orchestrator"):
            rows = [row for row in read_metrics(here.metrics(role)) if row["step"] == step]
            part.metrics(role).parent.mkdir(parents=True, exist_ok=True)
            part.metrics(role).write_text("".join(json.dumps(row) + "\n" for row in rows))
        for segment in _copy_ledger(here, part, step):
            part.segment(segment).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here.segment(segment), part.segment(segment))
        with atomic_path(path) as target, tarfile.open(target, "w:gz", compresslevel=1) as archive:
            archive.add(part.path, part.path.name)
            _add_models(archive, part, _models_of(run.config))
    return path


def make_parent(path: Path) -> None:
    """Make the directory of a file that is given with --out. Raises: ConfigError if that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise ConfigError(
            f"--out {path}: {path.parent} cannot be made ({cause.strerror}); name another place"
        ) from None


def without_secrets(data: Any) -> Any:
    """The data of a config for somebody else: environment variables and keys that are secrets are left out."""
    if isinstance(data, list):
        return [without_secrets(each) for each in data]
    if not isinstance(data, dict):
        return data
    kept = {name: value for name, value in data.items() if not is_secret(name) and name != "headers"}
    return {name: without_secrets(value) for name, value in kept.items()}


def _copy_ledger(here: RunDir, part: RunDir, step: int) -> list[int]:
    """Copy what the ledger holds of a step; the segments that have its tokens."""
    uri = here.ledger.resolve().as_uri() + "?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as source, closing(sqlite3.connect(part.ledger)) as target:
        source.backup(target)
        for statement in PRUNED:
            target.execute(statement, {"step": step})
        target.commit()
        target.execute("VACUUM")
        found = target.execute("SELECT DISTINCT segment FROM rollouts WHERE segment IS NOT NULL")
        return [segment for (segment,) in found]


def unpack(path: Path) -> Path:
    """Unpack a bundle beside it, once; the directory.

    Raises: ConfigError if it is none, or if another run, or another bundle of that name, is there.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        with tarfile.open(path, "r:gz") as archive, tempfile.TemporaryDirectory(dir=path.absolute().parent) as scratch:
            names = {name.split("/")[0] for name in archive.getnames()}
            if len(names) != 1 or names & {"", ".", ".."}:
                raise tarfile.TarError("it does not consist of one directory")
            directory = path.absolute().parent / (name := names.pop())
            if not directory.exists():
                archive.extractall(scratch, filter="data")
                while archive.fileobj is not None and archive.fileobj.read(READ_BYTES):
                    pass  # to its end, where the checksum is
                part = Path(scratch) / name
                (part / UNPACKED).write_text(digest)
                part.rename(directory)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, NotADirectoryError) as error:
        raise ConfigError(
            f"{path}: this is no bundle that `stretto replay RUN --bundle N` has written: {error}"
        ) from None
    if not (mark := directory / UNPACKED).is_file() or mark.read_text() != digest:
        raise ConfigError(f"{path}: {directory} is there already, and is not from this file; move one of them away")
    return directory
