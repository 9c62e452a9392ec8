"""Evals on environments during `sft`: a child process with an engine evaluates versions.

    an eval is due -> publish RUN/broadcasts/version_N -> training continues
    later: the child writes RUN/evals/version_N/results.json
    at the end: write RUN/evals/END, and wait for the remaining results

The child runs follow.py; it is started and stopped here, and always ends with this process.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path

from stretto.base import process
from stretto.base.errors import EngineError
from stretto.base.files import read_rows
from stretto.config.root import EvalsConfig, SFTConfig
from stretto.trainer.learner import Learner
from stretto.trainer.publish.export import export_model
from stretto.trainer.ranks.mesh import is_lead_process
from stretto.transports.weights.filesystem import FilesystemPublisher

logger = logging.getLogger(__name__)

POLL_S = 0.2
STOP_S = 5.0


class OnlineEvals:
    """The evals of one run. All ranks call `evaluate`; the lead starts the child process."""

    def __init__(self, cfg: SFTConfig, learner: Learner, tokenizer_dir: Path, max_steps: int) -> None:
        assert cfg.eval is not None
        self._section, self._learner, self._run, self._max_steps = cfg.eval, learner, cfg.run_dir, max_steps
        self._published, self._has_failed = -1, False
        self._said_lost: set[int] = set()
        model = cfg.model.name
        if cfg.model.scratch is not None:  # an engine starts from a directory
            model = str(self._run.eval_model)
            export_model(learner.network.weights, self._run.eval_model, tokenizer_dir)
        # Versions are kept here until they are evaluated, without a limit.
        self._publisher = FilesystemPublisher(self._run.broadcasts, keep_versions=1, ranks=learner.mesh)
        if not is_lead_process():
            return
        self._run.evals.mkdir(parents=True, exist_ok=True)
        self._run.evals_end.unlink(missing_ok=True)
        self._publisher.keep(self._waiting_versions())
        section = cfg.eval.model_dump()
        settings = {key: section.pop(key) for key in ("max_inflight_rollouts", "rollout_timeout_s")}
        # Only the keys that were given: without a port, the process that starts the engine finds a free one.
        settings["inference"] = cfg.eval.inference.model_dump(exclude_unset=True)
        key = settings["inference"].pop("api_key", None)  # passed in the environment, not in a file
        settings["inference"].setdefault("num_threads", 1)  # the trainer has the other cores
        del section["inference"], section["timeout_s"]
        config = EvalsConfig.model_validate(
            settings
            | {
                "model": model,
                "tokenizer": cfg.tokenizer.model_dump(),
                "renderer": cfg.renderer.model_dump(),
                "eval": section,
                "seq_len": cfg.seq_len,
                "seed": cfg.seed,
                "monitors": cfg.monitors.model_dump(),
                "log": cfg.log.model_dump(),
                "output_dir": cfg.output_dir,
                "run": {"name": cfg.run_name},
                "watch": self._run.broadcasts,
                "max_steps": max_steps,
            }
        )
        path = self._run.config("evals")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.model_dump_json(indent=2, exclude_unset=True))
        self._child = process.start(
            "evals",
            (sys.executable, "-m", "stretto", "evals", "@", str(path)),
            env=process.thread_env(1) | ({} if key is None else {config.client.api_key_var: key}),
            log=self._run.log("evals"),
        )

    def evaluate(self, *, is_last: bool = False) -> None:
        """Publish the current weights if an eval is due; with is_last it always is.

        If the eval process has ended, training continues; `wait_for_results` raises its error.
        """
        step = self._learner.step
        if step == self._published or not self._section.is_due(step, end=step if is_last else self._max_steps):
            return
        self._published = step
        has_ended = is_lead_process() and self._child.returncode is not None
        if has_ended and not self._has_failed:
            logger.error("%s", self._exit_message())
        self._has_failed = has_ended
        if self._learner.mesh.broadcast(has_ended, bool):
            return
        start = time.perf_counter()
        self._publisher.publish(step, self._learner.export_tensors(is_merged=True))
        if not is_lead_process():
            return
        self._release()
        logger.info("step %d: published weights to be evaluated in %.2fs", step, time.perf_counter() - start)
        self._say_lost()

    def wait_for_results(self) -> dict[int, dict[str, float]]:
        """Wait for the remaining results; mean rewards by version and "environment/mode".

        Raises: EngineError when the eval process fails, or is not done in timeout_s.
        """
        if not is_lead_process():
            return {}
        self._run.evals_end.write_text(f"{self._published}\n")
        deadline = time.monotonic() + self._section.timeout_s
        while self._child.returncode is None:
            if time.monotonic() > deadline:
                self.close()
                raise EngineError(
                    f"the last evals were not done {self._section.timeout_s:g} s after training (eval.timeout_s); "
                    f"see {self._child.log}"
                )
            time.sleep(POLL_S)
        if self._child.returncode:
            raise EngineError(self._exit_message())
        self._say_lost()
        return read_results(self._run.evals)

    def _say_lost(self) -> None:
        """Warn of versions whose evals failed, once: the process beside goes on with the next one."""
        paths = self._run.evals.glob("version_*/results.json")
        lost = {version_of(path) for path in paths if read_rows(path) == []} - self._said_lost
        self._said_lost |= lost
        if lost:
            logger.warning("no eval of version %s: %s says why", ", ".join(map(str, sorted(lost))), self._child.log)

    def close(self) -> None:
        """Stop the process, even if it is not done."""
        if is_lead_process():
            self._child.signal_group(signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
            while self._child.returncode is None and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
            self._child.kill()

    def _exit_message(self) -> str:
        code = self._child.returncode
        assert code is not None
        lines = "\n  ".join(self._child.tail())
        return f"the process of the evals ended ({process.describe_exit(code)}); its last lines:\n  {lines}"

    def _waiting_versions(self) -> list[int]:
        """Versions of this run that are published and not yet evaluated, in order."""
        versions = sorted(int(path.name.partition("_")[2]) for path in self._run.broadcasts.glob("version_*"))
        waiting = (version for version in versions if read_rows(self._run.eval_results(version)) is None)
        return [version for version in waiting if version <= self._learner.step]

    def _release(self) -> None:
        """Release all versions before the oldest one that is not evaluated yet."""
        self._publisher.release(next(iter(self._waiting_versions()), self._published) - 1)


def version_of(path: Path) -> int:
    """The version of an eval's results."""
    return int(path.parent.name.partition("_")[2])


def read_results(evals: Path) -> dict[int, dict[str, float]]:
    """Mean rewards by version, for every eval with results; one that failed or is damaged has none."""
    means = {}
    for path in evals.glob("version_*/results.json"):
        if not (rows := read_rows(path, "env", "mode", "mean")):
            continue
        means[version_of(path)] = {f"{row['env']}/{row['mode']}": row["mean"] for row in rows}
    return dict(sorted(means.items()))
