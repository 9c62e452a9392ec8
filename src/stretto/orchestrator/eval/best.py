"""The best version of a run by held-out reward: its weights are kept, and a run that stays behind it ends.

A score is a version's mean reward over environments. RUN/weights/best is a directory of its own, whose files are hard
links to an export; so deleting older exports takes nothing from it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from stretto.base.files import put_in_place
from stretto.base.paths import RunDir
from stretto.config.sections.orchestrator import EarlyStopSection

logger = logging.getLogger(__name__)


def best_of(scores: Mapping[int, float]) -> int | None:
    """The version with the highest score, the earliest of several; None without scores."""
    return max(sorted(scores), key=lambda version: scores[version], default=None)


def reason_to_stop(scores: Mapping[int, float], section: EarlyStopSection) -> str | None:
    """Why a run with these scores by version ends now; None if it goes on."""
    versions = sorted(scores)
    if not versions:
        return None
    newest = scores[versions[-1]]
    if section.target is not None and newest >= section.target:
        return f"version {versions[-1]} has {newest:.4g}, and early_stop.target is {section.target:g}"
    best, num_worse = versions[0], 0
    for version in versions[1:]:
        if scores[version] > scores[best] + section.min_delta:
            best, num_worse = version, 0
        else:
            num_worse += 1
    if section.patience is None or num_worse < section.patience:
        return None
    return (
        f"{num_worse} evals since version {best} ({scores[best]:.4g}) are not better by more than "
        f"{section.min_delta:g} (early_stop.patience = {section.patience})"
    )


class BestKeeper:
    """Copies the best version's export to RUN/weights/best, once the trainer has written it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.wanted: int | None = None
        """The version that should be kept, and whose export is not there yet."""

    def want(self, version: int) -> None:
        """Keep this version's weights; its export may come later."""
        self.wanted = version
        self.keep_if_there()

    def keep_if_there(self) -> None:
        """Copy the export of the version that is wanted, if it is complete."""
        if self.wanted is None or not (source := self._run.weights_step(self.wanted)).is_dir():
            return
        version, self.wanted = self.wanted, None
        try:
            link_directory(source, self._run.best_weights)
        except OSError as error:
            logger.warning("the best version, %d, is not kept as %s: %s", version, self._run.best_weights, error)
            return
        logger.info("version %d is the best so far: %s", version, self._run.best_weights)


def link_directory(source: Path, target: Path) -> None:
    """Make `target` a directory with the files of `source`: hard links, or copies where the disk has no links."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, copy_function=_link_or_copy)
    put_in_place(part, target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
