"""The loss of rows that are not trained on, and what follows from it: the best weights, and an early end.

RUN/weights/best is written as soon as a validation has the lowest loss so far; its file best.json says of which step.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from stretto.base.files import read_json
from stretto.base.paths import RunDir
from stretto.config.sections.sft import ValSection
from stretto.trainer.learner import Learner
from stretto.trainer.publish.export import export_model

logger = logging.getLogger(__name__)

ABOUT = "best.json"
OF_PAIRS = {"val/rewards/accuracies": "rewards/accuracies", "val/rewards/margins": "rewards/margins"}
"""Metrics beside the loss, and what `evaluate` calls them for pairs."""


class Validation:
    """The validations of one run. All ranks call `measure`."""

    def __init__(
        self, section: ValSection, batches: list[Any], learner: Learner, run: RunDir, tokenizer_dir: Path
    ) -> None:
        """batches: the rows, as `learner.evaluate` takes them."""
        self.section, self._batches, self._learner = section, batches, learner
        self._run, self._tokenizer_dir = run, tokenizer_dir
        self.losses: dict[int, float] = {}
        """By step, in nats per trained token; of pairs, the mean of their losses."""
        self.stop_reason: str | None = None
        """Why the run ends now, if early_stop ends it."""

    @property
    def newest(self) -> float | None:
        """The loss of the last validation."""
        return self.losses[max(self.losses)] if self.losses else None

    @property
    def best_step(self) -> int | None:
        """The step with the lowest loss, the earliest of several."""
        return min(sorted(self.losses), key=self.losses.__getitem__, default=None)

    def state(self) -> list[list[float]]:
        """What a checkpoint keeps."""
        return [[step, loss] for step, loss in sorted(self.losses.items())]

    def load(self, state: Any, start: int) -> None:
        """Continue with the losses of a checkpoint of step `start`, which may have none."""
        self.losses = {int(step): float(loss) for step, loss in state or ()}
        kept = read_json(self._run.best_weights / ABOUT).get("step", 0)
        if self.section.keep_best and kept > start:
            text = "%s is of step %d, which was taken back; it stays until a validation is better than those before"
            logger.warning(text, self._run.best_weights, kept)

    def measure(self) -> dict[str, float]:
        """Measure the loss of the weights as they are, keep them if they are the best, and decide whether to go on."""
        start, mesh, step = time.perf_counter(), self._learner.mesh, self._learner.step
        found = self._learner.evaluate(mesh.local_items(self._batches))
        loss = found["nll"] if "nll" in found else found["loss"]
        self.losses[step] = mesh.broadcast(loss, float)  # ranks must decide the same
        metrics = {"val/loss": self.losses[step], "time/val": time.perf_counter() - start}
        metrics |= {name: found[key] for name, key in OF_PAIRS.items() if key in found}
        if self.section.keep_best and self.best_step == step and step > 0:
            self._keep()
        if self.section.early_stop is not None:
            self.stop_reason = self.section.early_stop.reason_to_stop(self.losses, is_loss=True)
        return metrics

    def _keep(self) -> None:
        export_model(self._learner.network.weights, self._run.best_weights, self._tokenizer_dir)
        if self._learner.network.weights.mesh.is_lead:
            step = self._learner.step
            about = {"step": step, "val_loss": self.losses[step]}
            (self._run.best_weights / ABOUT).write_text(json.dumps(about))
            logger.info("step %d has the lowest validation loss so far: %s", step, self._run.best_weights)
