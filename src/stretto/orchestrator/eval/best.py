"""The best version of a run by held-out reward, whose weights are kept.

A score is a version's mean reward over environments. RUN/weights/best is a directory of its own, whose files are hard
links to an export; so deleting older exports takes nothing from it. Its file best.json says which version it is.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from stretto.base.files import identity, put_in_place
from stretto.base.paths import RunDir

logger = logging.getLogger(__name__)

ABOUT, VERSION = "best.json", "version"


def best_of(scores: Mapping[int, float]) -> int | None:
    """The version with the highest score, the earliest of several; None without scores."""
    return max(sorted(scores), key=lambda version: scores[version], default=None)


class BestKeeper:
    """Copies the best version's export to RUN/weights/best, once the trainer has written it.

    start: the step that the run continues from. Exports of later steps, which a resume has taken back, are not those
    of the versions that will have their numbers.
    """

    def __init__(self, run: RunDir, start: int = 0) -> None:
        self._run = run
        self._taken_back = {path: identity(path) for path in run.weights.glob("step_*") if _number(path) > start}
        self.wanted: int | None = None
        """The version that should be kept, and whose export is not there yet."""

    def resume(self, best: int | None, start: int) -> None:
        """Keep `best`, the best version up to `start`, if a kill or steps that were taken back left another one."""
        kept = self._kept()
        if best is None or kept == best:
            return
        if self._is_exported(best):
            self.want(best)
        elif kept is not None and kept > start:
            text = "%s is version %d, whose step was taken back, and version %d, the best up to step %d, has no export"
            logger.warning(text, self._run.best_weights, kept, best, start)

    def want(self, version: int) -> None:
        """Keep this version's weights; its export may come later."""
        self.wanted = version
        self.keep_if_there()

    def keep_if_there(self) -> None:
        """Copy the export of the version that is wanted, if it is complete."""
        if self.wanted is None or not self._is_exported(self.wanted):
            return
        version, self.wanted = self.wanted, None
        try:
            link_directory(self._run.weights_step(version), self._run.best_weights, {VERSION: version})
        except OSError as error:
            logger.warning("the best version, %d, is not kept as %s: %s", version, self._run.best_weights, error)
            return
        logger.info("version %d is the best so far: %s", version, self._run.best_weights)

    def _is_exported(self, version: int) -> bool:
        path = self._run.weights_step(version)
        return path.is_dir() and identity(path) != self._taken_back.get(path)

    def _kept(self) -> int | None:
        """The version in RUN/weights/best; None if there is none."""
        try:
            return int(json.loads((self._run.best_weights / ABOUT).read_text())[VERSION])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _number(path: Path) -> int:
    number = path.name.removeprefix("step_")
    return int(number) if number.isdecimal() else 0


def link_directory(source: Path, target: Path, about: Mapping[str, int]) -> None:
    """Make `target` a directory with the files of `source`: hard links, or copies where the disk has no links.

    about: what its file `best.json` says.
    """
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, copy_function=_link_or_copy)
    (part / ABOUT).write_text(json.dumps(dict(about)))
    put_in_place(part, target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
