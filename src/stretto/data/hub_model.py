"""Models of the Hugging Face Hub: whether one is in the local cache, how large it is, and its download.

A model is written `ORG/NAME`. `find_local` looks on this machine only, `look_up` queries the Hub and downloads nothing,
`fetch` downloads what is missing. One process downloads while all others on the machine wait for its lock. An
interrupted download keeps the files that are complete, and the next one continues from there. The cache is
huggingface_hub's own (HF_HOME), which `hf download` fills too.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, meant_path, near_path
from stretto.base.files import lock_within, unlock
from stretto.base.status import bytes_below, growing

logger = logging.getLogger(__name__)

Report = Callable[[str], object]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TOKENIZER = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template*", "model.safetensors.index.json",
    "*processor_config.json",
)  # fmt: skip
_PATTERNS = (*_TOKENIZER, "*.safetensors", "*.py")
_IGNORED = ["*/*", "consolidated*"]
"""Subdirectories have the same weights for other programs; `consolidated*` is a second copy."""
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FIRST_REPORT_S, _REPORT_S, _LOCK_TRY_S = 2.0, 15.0, 5.0
_RETRY_S = 60.0
_ANSWER_S = 8.0
"""Longest wait for the Hub's first answer: a network that swallows requests gives none."""


@dataclass(frozen=True)
class HubModel:
    """The files of a model on the Hub that are needed here."""

    name: str
    num_files: int
    num_bytes: int
    missing_bytes: int
    """Bytes of the files that are not in the cache."""
    cache: Path

    @property
    def free_bytes(self) -> int:
        """Free space on the cache's disk."""
        existing = next(path for path in (self.cache, *self.cache.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def __str__(self) -> str:
        text = f"{size(self.num_bytes)} in {self.num_files} files"
        is_partial = self.missing_bytes != self.num_bytes
        return f"{text}, of which {size(self.missing_bytes)} are missing" if is_partial else text


def is_hub_name(name: str) -> bool:
    """Whether a text has the form of a model of the Hub, `ORG/NAME`."""
    return _NAME.fullmatch(name) is not None


def find_local(name: str, *, has_weights: bool = True) -> Path | None:
    """The directory `name`, or the snapshot of that model in the cache; None if it is missing or incomplete.

    has_weights: False if a tokenizer is enough.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    snapshot = _find_cached(name, "config.json" if has_weights else "tokenizer.json")
    return snapshot if snapshot is not None and (not has_weights or _has_weights(snapshot)) else None


def find_config(name: str) -> Path | None:
    """A directory with the config.json of a model; that file alone is downloaded if the Hub can be reached.

    Raises: ConfigError if the name is that of a file.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise ConfigError(f"model {name!r}: this is a file, and a model is a directory; {_GIVE}")
    if (path / "config.json").is_file():
        return path
    if path.is_dir() or not is_hub_name(name):
        return None
    if (cached := _find_cached(name, "config.json")) is not None:
        return cached
    if time.monotonic() < _retry_at.get(name, 0.0):
        return None
    from huggingface_hub import hf_hub_download

    try:
        with _hub_errors(name):
            _model_info(name)  # fails without a network immediately; a download would retry for 20 s
            return Path(hf_hub_download(name, "config.json")).parent
    except ConfigError as error:  # `look_up` says why
        if (_status_of(error.__cause__) or 500) >= 500:
            _retry_at[name] = time.monotonic() + _RETRY_S
        return None


_retry_at: dict[str, float] = {}
"""When to query the Hub again, by models for which it did not answer: a dry run needs each config several times."""


def look_up(name: str, *, has_weights: bool = True) -> HubModel:
    """Query the Hub for the files of a model and their sizes; downloads nothing.

    Raises: ConfigError if it has no such model, refuses this user, or cannot be reached.
    """
    if not is_hub_name(name):
        raise ConfigError(_no_directory(name))
    from huggingface_hub.utils import filter_repo_objects

    with _hub_errors(name):
        info = _model_info(name)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = list(filter_repo_objects(sizes, allow_patterns=_patterns(has_weights), ignore_patterns=_IGNORED))
    if has_weights and not any(file.endswith(".safetensors") for file in files):
        raise ConfigError(
            f"model {name!r}: it has no weights as safetensors on the Hub, and no other format is read; {_GIVE}"
        )
    snapshot = _repo_folder(name) / "snapshots" / str(info.sha)
    num_bytes = sum(sizes[file] for file in files)
    missing_bytes = sum(sizes[file] for file in files if not (snapshot / file).exists())
    return HubModel(name, len(files), num_bytes, missing_bytes, _cache())


def _model_info(name: str) -> Any:
    """huggingface_hub's ModelInfo of a model that this user may read; raises that library's errors.

    A Hub that gave no answer is not asked again for a while: the error is the same.
    """
    from huggingface_hub import HfApi, constants

    failed_at, failure = _no_answer.get(constants.ENDPOINT, (0.0, None))
    if failure is not None and time.monotonic() < failed_at + _RETRY_S:
        raise failure
    api = HfApi()
    try:
        info = api.model_info(name, files_metadata=True, timeout=_ANSWER_S)
    except Exception as error:  # of the hub's client and of the HTTP library below it
        if _status_of(error) is None and type(error).__name__.endswith("Timeout"):
            _no_answer[constants.ENDPOINT] = (time.monotonic(), error)
        raise
    if info.gated:
        api.auth_check(name)
    return info


_no_answer: dict[str, tuple[float, Exception]] = {}
"""By address of a Hub: when it last gave no answer, and the error."""


def fetch(name: str, *, has_weights: bool = True, report: Report = logger.info) -> Path:
    """The directory `name`, or the snapshot of that model of the Hub, which is downloaded if it is missing.

    report: gets lines about the size, the progress, and a wait for another process.

    Raises: ConfigError if there is neither, the disk is too small, or the download is interrupted.
    """
    if (path := find_local(name, has_weights=has_weights)) is not None:
        return path
    model = look_up(name, has_weights=has_weights)
    with _download_lock(name, report):
        path = find_local(name, has_weights=has_weights)
        return path or _download(model, has_weights=has_weights, report=report)


def size(num_bytes: float) -> str:
    """`8.05 GB`: decimal units, three digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _download(model: HubModel, *, has_weights: bool, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    name = model.name
    if model.missing_bytes > model.free_bytes:
        raise ConfigError(
            f"model {name!r}: {size(model.missing_bytes)} are to be downloaded and {model.cache} has "
            f"{size(model.free_bytes)} free; free some space there, or set HF_HOME to a directory on a larger disk"
        )
    report(f"downloading {name}: {model}, into {model.cache} ({size(model.free_bytes)} free)")
    had_bars, start = not are_progress_bars_disabled(), time.monotonic()
    disable_progress_bars()  # they would be one per file, in every log
    try:
        with _reports(model, report), _hub_errors(name, has_begun=True):
            found = Path(snapshot_download(name, allow_patterns=_patterns(has_weights), ignore_patterns=_IGNORED))
    finally:
        if had_bars:
            enable_progress_bars()
    if find_local(name, has_weights=has_weights) is None:
        raise ConfigError(
            f"model {name!r}: {found} has no config.json with complete weights after the download; {_GIVE}"
        )
    report(f"downloaded {name} in {time.monotonic() - start:.0f} s")
    return found


@contextmanager
def _reports(model: HubModel, report: Report) -> Iterator[None]:
    """Report how far a download is, from the bytes that the cache has."""
    blobs = _repo_folder(model.name) / "blobs"
    before, start, has_ended = bytes_below(blobs), time.monotonic(), threading.Event()
    num_cached = model.num_bytes - model.missing_bytes

    def report_until_end() -> None:
        wait_s = _FIRST_REPORT_S
        while not has_ended.wait(wait_s):
            wait_s = _REPORT_S
            new = bytes_below(blobs) - before
            rate, done = new / (time.monotonic() - start), num_cached + new
            left = f", {max(model.missing_bytes - new, 0) / rate:.0f} s left" if rate else ""
            share = f"{size(done)} of {size(model.num_bytes)} ({done / max(model.num_bytes, 1):.0%})"
            report(f"{model.name}: {share}, {size(rate)}/s{left}")

    thread = threading.Thread(target=report_until_end, daemon=True)
    thread.start()
    try:
        done_bytes = lambda: num_cached + bytes_below(blobs) - before
        with growing(f"download of {model.name}, MB", model.num_bytes, done_bytes):
            yield
    finally:
        has_ended.set()
        thread.join()


@contextmanager
def _download_lock(name: str, report: Report) -> Iterator[None]:
    """Hold the lock of a model's download; the kernel releases it when its holder dies."""
    folder = _cache() / ".locks"
    path = folder / f"{_repo_folder(name).name}.stretto"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as cause:
        raise ConfigError(
            f"model {name!r}: {folder} cannot be written: {cause.strerror}; set HF_HOME to a directory that can be"
        ) from cause
    try:
        if not lock_within(lock, 0):
            report(f"{name}: another process is downloading it; waiting until it has ended")
            while not lock_within(lock, _LOCK_TRY_S):
                pass
        yield
    finally:
        unlock(lock)


@contextmanager
def _hub_errors(name: str, *, has_begun: bool = False) -> Iterator[None]:
    """Turn errors of huggingface_hub into ConfigErrors.

    has_begun: whether some files may be downloaded already.
    """
    from huggingface_hub import errors

    # The HTTP library differs between versions; its error is the base of errors of a connection.
    http_errors: tuple[type[Exception], ...] = (*errors.HfHubHTTPError.__bases__, OSError, RuntimeError)
    try:
        yield
    except errors.GatedRepoError as cause:
        from huggingface_hub import constants

        raise ConfigError(
            f"model {name!r} is gated: accept its terms at {constants.ENDPOINT}/{name}, then log in with "
            "`hf auth login`, or set HF_TOKEN, as a user whom its owner has let in"
        ) from cause
    except errors.HFValidationError as cause:
        raise ConfigError(_no_directory(name)) from cause
    except errors.RepositoryNotFoundError as cause:
        raise ConfigError(
            f"model {name!r}: no such directory, and the Hub has no model of that name, or does not show it to this "
            "user. Is the name right? One that is not public needs `hf auth login`, or HF_TOKEN"
        ) from cause
    except http_errors as cause:
        status = _status_of(cause)
        if status in (401, 403):
            raise ConfigError(
                f"model {name!r}: the Hub refuses this login ({status}); renew it with `hf auth login`, or set HF_TOKEN"
            ) from cause
        reason = _reason(cause)
        if has_begun:
            raise ConfigError(
                f"model {name!r}: the download was interrupted: {reason}. Start again: complete files are kept, and "
                "it continues with the others"
            ) from cause
        raise ConfigError(
            f"model {name!r}: no such directory, no complete model of that name in the local hub cache "
            f"({_cache()}), and the Hub is not reached: {reason}. Where there is a network, `hf download {name}` "
            "fetches it into the cache (HF_HOME), which may be copied here; or give a directory"
        ) from cause


_GIVE = "give a directory with config.json and safetensors, or a model of the Hub, ORG/NAME"


def _no_directory(name: str) -> str:
    path = Path(name)
    if (near := near_path(path.expanduser())) is not None:
        return f"model {name!r}: no such directory; did you mean {near}? If not, {_GIVE}"
    return f"model {name!r}: no such directory{meant_path(path)}; {_GIVE}"


def _status_of(cause: BaseException | None) -> int | None:
    """The HTTP status of the Hub's answer; None if there was no answer."""
    return getattr(getattr(cause, "response", None), "status_code", None)


def _reason(cause: BaseException) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if type(cause).__name__.endswith("Timeout"):
        return f"no answer from {constants.ENDPOINT} in {_ANSWER_S:g} s"
    text = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
    return re.sub(r"\[Errno -?\d+\] ", "", text).rstrip(".")


def _patterns(has_weights: bool) -> list[str]:
    return [*(_PATTERNS if has_weights else _TOKENIZER)]


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _repo_folder(name: str) -> Path:
    return _cache() / f"models--{name.replace('/', '--')}"


def _find_cached(name: str, file: str) -> Path | None:
    """The snapshot of a model in the cache that has this file."""
    if not is_hub_name(name):
        return None
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        found: Any = try_to_load_from_cache(name, file)
    except errors.HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _has_weights(snapshot: Path) -> bool:
    """Whether a snapshot has all weights: the files that its index names, or a single file."""
    if not (snapshot / _INDEX).is_file():
        return (snapshot / _SINGLE).is_file()
    try:
        files = set(json.loads((snapshot / _INDEX).read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return bool(files) and all((snapshot / file).is_file() for file in files)
