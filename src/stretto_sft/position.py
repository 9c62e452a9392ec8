"""Where a run of `sft` stands: its position in the data, and what it has used, in its checkpoints."""

from __future__ import annotations

import logging
from typing import Any

from stretto.base.errors import DataError
from stretto.base.paths import RunDir
from stretto.monitors.purse import Used, used_by_metrics
from stretto.trainer.state import checkpoint
from stretto_sft.rows import Rows

logger = logging.getLogger(__name__)

ROLE = "sft"
"""The name of its process in metrics and logs."""
ResumePoint = tuple[RunDir, int]
"""The run and the step whose checkpoint a run resumes from."""


def find_data_position(start: ResumePoint, cursor: dict[str, Any], examples: Rows, *, is_own: bool) -> int:
    """The number of examples drawn at a checkpoint; 0 if it is another run's with other data.

    Raises: DataError when the data of this run has changed.
    """
    if cursor["data"] == examples.fingerprint():
        return cursor["num_drawn"]
    where = start[0].checkpoint(start[1])
    if is_own:
        raise DataError(
            f"{where}: was trained on other data than [data] gives now, so it cannot be continued exactly; "
            "restore the data, or start a new run from this checkpoint with --resume.dir."
        )
    logger.info("%s was trained on other data; [data] is read from its first example", where)
    return 0


def used_before(run: RunDir, start: ResumePoint | None) -> Used:
    """What earlier starts of a run have used, by its checkpoint, and by its metrics also after that."""
    if start is None or start[0] != run:
        return Used()
    saved = Used.of(read_position(start).get("used", {}))
    return max(saved, used_by_metrics(run.metrics(ROLE)), key=lambda used: used.seconds)


def read_position(start: ResumePoint) -> dict[str, Any]:
    """The position in the data that is part of a checkpoint of `sft`."""
    return checkpoint.read_cursor(*start)
