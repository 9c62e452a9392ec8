"""Records of data sets of the Hugging Face Hub, read by the library `datasets` (the extra `hub`).

A data set is written `ORG/NAME[SPLIT]` or `ORG/NAME:CONFIG[SPLIT]`, for example `openai/gsm8k:main[train]`. The split
may be a slice in the library's syntax, `train[:500]`. ORG/NAME may also be a directory with the files of such a
repository. The split is required, so that no file name looks like a data set. The library keeps a copy on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import re
import sys
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError, DataError
from stretto.data.values import without_null_columns

logger = logging.getLogger(__name__)

REQUESTS = "huggingface_hub.utils._http"
"""The logger of the Hub's library to which repeated requests are told."""
_SOURCE = re.compile(r"(?P<repo>[^:\[\]]+)(?::(?P<config>[^:\[\]]+))?\[(?P<split>.+)\]")
_REPO = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_SLICED = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<start>\d*):(?P<stop>\d*)\])?")


@dataclass(frozen=True)
class HubSource:
    """A split of a data set of the Hub, or of a directory with the files of one."""

    repo: str
    config: str | None
    split: str
    is_guessed: bool = False
    """Named without its split, which is `train`; what is no path here is taken for a data set."""

    def __str__(self) -> str:
        return f"{self.repo}{f':{self.config}' if self.config else ''}[{self.split}]"


def parse_source(text: str) -> HubSource | None:
    """Parse `ORG/NAME[SPLIT]` or `ORG/NAME:CONFIG[SPLIT]`; None for any other text."""
    match = _SOURCE.fullmatch(text)
    if match is None or not (Path(match["repo"]).is_dir() or _REPO.fullmatch(match["repo"])):
        return None
    return HubSource(match["repo"], match["config"], match["split"])


def looks_like_hub_name(text: str) -> bool:
    """Whether a text is `ORG/NAME` or `ORG/NAME:CONFIG`, a data set without its split."""
    return _REPO.fullmatch(text.partition(":")[0]) is not None


def parse_bare_name(text: str) -> HubSource | None:
    """The split `train` of `ORG/NAME` or `ORG/NAME:CONFIG`; None for other texts, and below a directory."""
    repo, _, config = text.partition(":")
    if not looks_like_hub_name(text) or Path(repo).parent.exists():
        return None
    return HubSource(repo, config or None, "train", is_guessed=True)


def read_hub(source: HubSource, setting: str, *, is_streamed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """All records of a split, in order, each with its place `ORG/NAME[SPLIT], row 3`.

    is_streamed: read over the network, as far as the caller iterates, without a copy on disk.

    Raises: ConfigError if the library is missing, or the data set has no such config or split; DataError if it cannot
    be fetched.
    """
    rows = _read(source, setting, is_streamed)
    _open_rows.add(rows)
    return rows


def _read(source: HubSource, setting: str, is_streamed: bool) -> Generator[tuple[str, dict[str, Any]], None, None]:
    number = 0
    try:
        for number, row in enumerate(_open(source, setting, is_streamed), start=1):
            yield f"{source}, row {number}", without_null_columns(row)
    except (OSError, RuntimeError) as cause:
        where = f"after row {number}: " if number else ""
        raise DataError(f"{setting} = {str(source)!r}: {where}{_message_of(cause)}") from cause
    finally:
        gc.collect()  # ends Arrow's threads, of a stream that was not read to its end and of what made a cache


_open_rows: weakref.WeakSet[Generator[tuple[str, dict[str, Any]], None, None]] = weakref.WeakSet()


@atexit.register
def _close_rows() -> None:
    """Close what is read before Python shuts down, when Arrow's threads would abort the process."""
    for rows in list(_open_rows):
        with contextlib.suppress(ValueError):  # another thread is reading it
            rows.close()


def _open(source: HubSource, setting: str, is_streamed: bool) -> Iterable[dict[str, Any]]:
    guess = ", which is no path here and so a data set of the Hub" if source.is_guessed else ""
    where = f"{setting} = {str(source)!r}{guess}"
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{where}: data sets of the Hub are read by the package datasets; pip install 'stretto[hub]'"
        ) from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # Otherwise a stream imports torch, to subclass its IterableDataset.
    datasets.config.TORCH_AVAILABLE = False
    try:
        with told_once(where):
            return _load(datasets, source, where, is_streamed)
    except (ConnectionError, ValueError) as cause:
        if _is_unreachable(cause):
            raise DataError(f"{where}: {_message_of(cause)} {_how_to_fetch(source)}") from cause
        raise ConfigError(f"{where}: {_message_of(cause)}") from cause  # no such config, split or slice
    except FileNotFoundError as cause:
        advice = "Is the name right? One that is not public needs `hf auth login`, or HF_TOKEN."
        raise DataError(f"{where}: {_message_of(cause)} {advice}") from cause


@contextlib.contextmanager
def told_once(where: str) -> Iterator[None]:
    """Say once that the Hub is asked again, in place of the two lines that its library prints per attempt."""
    is_told = False

    def tell(record: logging.LogRecord) -> bool:
        nonlocal is_told
        if not is_told:
            logger.warning("%s: the Hub does not answer; it is asked again for up to half a minute", where)
        is_told = True
        return False

    of_requests = logging.getLogger(REQUESTS)
    of_requests.addFilter(tell)
    try:
        yield
    finally:
        of_requests.removeFilter(tell)


def _load(datasets: Any, source: HubSource, where: str, is_streamed: bool) -> Iterable[dict[str, Any]]:
    try:
        return _load_from(datasets, source.repo, source, where, is_streamed)
    except (ConnectionError, ValueError) as error:
        copy = _snapshot(source.repo) if _is_unreachable(error) else None
        if copy is None:
            raise
        logger.info("%s: the Hub cannot be reached; reading the copy in %s", source, copy)
        try:
            return _load_from(datasets, str(copy), source, where, is_streamed)
        except (FileNotFoundError, ValueError) as other:
            # The copy may have only some files of the data set: then the first error is the reason.
            raise error if "data file" in str(other) else other from None


def _load_from(datasets: Any, path: str, source: HubSource, where: str, is_streamed: bool) -> Iterable[dict[str, Any]]:
    if not is_streamed:
        return datasets.load_dataset(path, source.config, split=source.split)
    sliced = _SLICED.fullmatch(source.split)
    if sliced is None:
        raise ConfigError(
            f"{where}: a stream has no end to count from; write the split as `train` or `train[10:500]`, or remove "
            "streaming"
        )
    rows = datasets.load_dataset(path, source.config, split=sliced["name"], streaming=True)
    return islice(rows, *(int(bound) if bound else None for bound in sliced.group("start", "stop")))


def _snapshot(repo: str) -> Path | None:
    """The copy of a data set that `hf download` made; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _how_to_fetch(source: HubSource) -> str:
    return (
        f"Where there is a network, `hf download {source.repo} --repo-type dataset` fetches it into the cache "
        "(HF_HOME), which may be copied here; with HF_HUB_OFFLINE = 1 only the cache is read."
    )


def _is_unreachable(error: Exception) -> bool:
    """Whether the Hub could not be reached; offline, the library's error says what its cache lacks."""
    return isinstance(error, ConnectionError) or "find cache for" in str(error)


def _message_of(error: BaseException) -> str:
    """The first two lines of an error: the mistake, and the valid choices."""
    text = " ".join(str(error).strip().splitlines()[:2]) or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
