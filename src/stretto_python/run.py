"""A run as lists of rows (metrics, rollouts, evals), each of which pandas.DataFrame takes.

    run = stretto.Run("outputs/demo")
    run.metrics()[-1]["reward/mean"]
    run.rollouts(step=50, worst=3)[0]["reply"]
    run.rollouts(step=50).to_pandas()

Each call reads the files anew, so a run may be read while it goes on. A run that this process has started is also
stopped and waited for here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from stretto.base.errors import ConfigError, DataError, EngineError, reason_of
from stretto.base.paths import RunDir
from stretto.chat.patches import ImageProcessor, load_image_processor
from stretto.chat.placeholders import one_per_image
from stretto.chat.tokenizer import Tokenizer, find_directory, load_tokenizer
from stretto.config.masks import masked
from stretto.ledger.reader import LedgerReader
from stretto.ledger.schema import SHOWN_STATUS
from stretto.monitors.file import read_metrics
from stretto.records.rollout import Branch, Rollout
from stretto.state import describe, no_run_text
from stretto_python.live import Live
from stretto_python.progress import Progress
from stretto_python.rows import LazyRows, Row, Rows

T = TypeVar("T")

_ROWS = f"""
    SELECT r.group_id, r.member, {SHOWN_STATUS} AS status, r.dropped_by, r.reason, r.reward, r.advantage,
           r.first_version, r.last_version, r.num_turns, r.num_tokens, r.num_sampled_tokens, r.started_at,
           r.finished_at, r.error, r.metrics, r.turns,
           d.env, d.task_id, json_extract(d.data, '$.label') AS label, d.state AS group_state,
           d.reason AS group_reason, b.step
    FROM rollouts r JOIN draws d USING (group_id)
    LEFT JOIN batch_rollouts x ON x.row = r.row
    LEFT JOIN batches b ON b.batch = x.batch AND b.state != 'undone'
    WHERE r.status NOT IN ('running', 'lost')
"""


STATUSES = ("finished", "truncated", "failed", "dropped")
"""What a rollout may be, for `rollouts`."""


class Run:
    """The directory of a run of `rl` or `sft`, which may still be running."""

    def __init__(self, path: Path | str, live: Live | None = None) -> None:
        """live: its process, if this one has started it.

        Raises: ConfigError when there is no run.
        """
        self.dir = RunDir(Path(path))
        try:
            is_run = self.dir.config("run").exists() or self.dir.ledger.exists()
            missing = "" if is_run else no_run_text(self.dir.path)
        except OSError as error:
            missing = f"cannot be read: {error.strerror}."
        if missing:
            raise ConfigError(f"{path}: {missing}")
        self._live = live

    def __repr__(self) -> str:
        return f"stretto.Run({str(self.dir)!r})"

    def _repr_html_(self) -> str:
        progress = Progress(self.dir)
        progress.refresh()
        progress.state = self.state
        return progress._repr_html_()

    # -- while it runs --

    @property
    def state(self) -> str:
        """`running`, `done`, `stopped`, `ended` or others, as `stretto runs` shows them."""
        if self._live is not None and self._live.is_running:
            return "running"
        return str(describe(self.dir)["state"])

    @property
    def is_running(self) -> bool:
        """Whether a process works on it."""
        return self.state == "running"

    def stop(self, *, now: bool = False) -> None:
        """Let it finish its step, save a checkpoint and end; now: end at once. `wait` waits for that.

        Raises: EngineError for a run of another process that cannot be stopped from here.
        """
        if self._live is not None:
            for _ in range(2 if now else 1):
                self._live.started.interrupt()
            return
        words = [sys.executable, "-m", "stretto", "stop", str(self.dir), *(["--now"] if now else [])]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineError((done.stderr or done.stdout).strip().removeprefix("error: "))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; whether it has. Ctrl-C and a kernel's interrupt stop it, as `stop` does.

        timeout_s: wait no longer; None: for as long as it takes.

        Raises: EngineError or ConfigError with the message of a run that has failed.
        """
        if self._live is not None:
            return self._live.wait(timeout_s)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self.is_running and (until is None or time.monotonic() < until):
            time.sleep(0.5)
        return not self.is_running

    # -- what it has done --

    @property
    def path(self) -> Path:
        return self.dir.path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, defaults included; secrets are masked."""
        path = self.dir.config("run")
        return masked(_json(path, dict)) if path.exists() else {}

    @property
    def summary(self) -> dict[str, Any]:
        """What the run reported at its end; {} before that."""
        return _json(self.dir.summary, dict) if self.dir.summary.exists() else {}

    def metrics(self) -> Rows:
        """One row per step, in order: `step`, `time` and everything that was logged."""
        rows: dict[int, dict[str, Any]] = {}
        for role in ("trainer", "sft", "orchestrator"):
            for row in read_metrics(self.dir.metrics(role)):
                rows.setdefault(row["step"], {}).update(row)
        return Rows(rows[step] for step in sorted(rows))

    def evals(self) -> Rows:
        """One row per evaluation: version, environment, mode (sampled or greedy), mean, pass@k and more."""
        files = sorted(self.dir.evals.glob("version_*/results.json"), key=lambda file: _version(file.parent))
        return Rows(
            {**_checked(row, file, dict), "version": _version(file.parent)}
            for file in files
            for row in _json(file, list)
        )

    def eval_samples(self, version: int, limit: int | None = None) -> Rows:
        """One row per rollout of the evaluation of a version, with its text; limit: of the first at most so many.

        Raises: ConfigError for a version that was not evaluated, with those that were.
        """
        if not self.dir.eval(version).is_dir():
            known = sorted(map(_version, self.dir.evals.glob("version_*")))
            raise ConfigError(
                f"eval_samples: version = {version!r:.60}: {self.dir} has {_listed('evaluated versions', known)}."
            )
        files = sorted(self.dir.eval(version).glob("*.jsonl"))
        return Rows(islice((row for file in files for row in _rows_of(file)), limit))

    def rollouts(
        self,
        *,
        step: int | None = None,
        env: str | None = None,
        status: str | None = None,
        min_reward: float | None = None,
        best: int | None = None,
        worst: int | None = None,
        limit: int | None = None,
    ) -> LazyRows:
        """One row per rollout, the newest try of each: rewards, versions, text, tokens and log-probabilities.

        Text and tokens are read as the rows are iterated over, and not kept.

        step: of the batch of this step; None takes those that no step trained too. status: finished, truncated,
        failed or dropped. min_reward: with at least this reward. best, worst: so many with the largest or smallest
        reward, of equal ones the newest. limit: of the newest at most so many. `prompt` is the text before the first
        token that the policy sampled and `reply` everything after it; `token_ids`, `is_sampled` and `logprobs` are
        arrays over both. Where a rollout has several branches these are of the first, and `branches` has all. They are
        None where the tokens are no longer kept.

        Raises: ConfigError for a run without rollouts, a step, environment or status that it does not have, and
        arguments that exclude each other.
        """
        for name, number in (("best", best), ("worst", worst), ("limit", limit)):
            if number is not None and (not isinstance(number, SupportsIndex) or int(number) < 1):
                raise ConfigError(f"rollouts: {name} = {number!r:.60} is not a number of rollouts; give 1 or more")
        if best is not None and worst is not None:
            raise ConfigError("rollouts: best and worst exclude each other; call it twice.")
        if not self.dir.ledger.exists():
            raise ConfigError(
                f"{self.dir}: this run has no rollouts (there is no {self.dir.ledger.name}); runs of `rl` have them."
            )
        where = ""
        values: list[str | int | float] = []
        for clause, value in (
            (" AND b.step = ?", step),
            (" AND d.env = ?", env),
            (" AND r.status = ?", status),
            (" AND r.reward >= ?", min_reward),
        ):
            if value is not None:
                where, values = where + clause, [*values, value]
        with LedgerReader(self.dir) as ledger:
            self._check_env(ledger, env)
            self._check_step(ledger, step)
            if status is not None and status not in STATUSES:
                raise ConfigError(f"rollouts: status = {status!r:.60}; give one of {', '.join(STATUSES)}.")
            rows = ledger.rows(_ROWS + where + _order(best, worst, limit), *values)
            for row in rows:
                row["turns"] = json.loads(row["turns"] or "[]")
            rows = rows if best is not None or worst is not None else sorted(rows, key=_place)
        return LazyRows(rows, self._with_tokens)

    def _with_tokens(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Rows with text and tokens; the rollouts of one group at a time are held."""
        with LedgerReader(self.dir) as ledger:
            found: tuple[int | None, Sequence[Rollout]] = (None, ())
            for row in rows:
                if row["group_id"] != found[0]:
                    found = (row["group_id"], _rollouts_of(ledger, row["group_id"]))
                own = [rollout for rollout in found[1] if rollout.member == row["member"]]
                yield {**row, **self._tokens(own[0].branches if own else ())}

    def plot(self, *keys: str, path: Path | str | None = None) -> Any:
        """The named metrics over the steps as a matplotlib figure; reward, length, entropy and mismatch without a name.

        path: where the picture is written too.
        """
        return plot([self], *keys, path=path)

    def _check_env(self, ledger: LedgerReader, env: str | None) -> None:
        names = [row["env"] for row in ledger.rows("SELECT DISTINCT env FROM draws ORDER BY env")]
        if env is not None and env not in names:
            raise ConfigError(f"{self.dir}: no environment {env!r} in this run; it has {', '.join(names) or 'none'}.")

    def _check_step(self, ledger: LedgerReader, step: int | None) -> None:
        if step is None:
            return
        known = [row["step"] for row in ledger.rows("SELECT step FROM batches WHERE state != 'undone' ORDER BY step")]
        if step not in known:
            raise ConfigError(f"rollouts: step = {step!r:.60}: {self.dir} has {_listed('steps', known)}.")

    def _tokens(self, branches: Sequence[Branch]) -> dict[str, Any]:
        if not branches:
            nothing = dict.fromkeys(("prompt", "reply", "token_ids", "is_sampled", "logprobs", "versions"))
            return {**nothing, "branches": []}
        shown = [self._shown(branch) for branch in branches]
        return {**{key: value for key, value in shown[0].items() if key != "agent"}, "branches": shown}

    def _shown(self, branch: Branch) -> dict[str, Any]:
        start = int(branch.is_sampled.argmax()) if branch.is_sampled.any() else len(branch.token_ids)
        text = self._text if self.tokenizer is not None else _as_numbers
        return {
            "agent": branch.agent,
            "prompt": text(branch.token_ids[:start]),
            "reply": text(branch.token_ids[start:]),
            "token_ids": branch.token_ids,
            "is_sampled": branch.is_sampled,
            "logprobs": branch.logprobs,
            "versions": [span.version for span in branch.versions],
        }

    def _text(self, token_ids: np.ndarray) -> str:
        assert self.tokenizer is not None
        return one_per_image(self.tokenizer.decode(token_ids))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The policy's; None where it cannot be found from here."""
        return self._found(load_tokenizer)

    @cached_property
    def image_processor(self) -> ImageProcessor | None:
        """The policy's; None for a model of text, or where it cannot be found from here."""
        return self._found(lambda place: load_image_processor(find_directory(place)))

    def _found(self, load: Callable[[str], T | None]) -> T | None:
        """What is loaded from the first place that has it."""
        model, tokenizer = self.config.get("model") or {}, self.config.get("tokenizer") or {}
        for place in (self.dir.latest_weights, self.dir.tokenizer, tokenizer.get("name"), model.get("name")):
            if place is not None:
                try:
                    if (found := load(str(place))) is not None:
                        return found
                except (ConfigError, DataError):
                    continue
        return None


def compare(runs: Sequence[Run | Path | str]) -> Rows:
    """One row per run: its name, steps, last rewards, held-out rewards before and after, speed."""
    rows = Rows()
    for run in (run if isinstance(run, Run) else Run(run) for run in runs):
        steps = [row for row in run.metrics() if row["step"] > 0]
        rewards = [row["reward/mean"] for row in steps if "reward/mean" in row][-10:]
        speeds = [row["tokens_per_s"] for row in steps if "tokens_per_s" in row]
        rows.append(
            {
                "run": run.name,
                "steps": steps[-1]["step"] if steps else 0,
                "reward": float(np.mean(rewards)) if rewards else None,
                **{
                    key: run.summary.get(key)
                    for key in ("reward_before", "reward_after", "greedy_before", "greedy_after")
                },
                "tokens_per_s": float(np.median(speeds)) if speeds else None,
            }
        )
    return rows


def plot(runs: Sequence[Run | Path | str], *keys: str, path: Path | str | None = None) -> Any:
    """The named metrics of several runs as one matplotlib figure, a colour per run; otherwise as `Run.plot`."""
    from stretto_python.plot import plot

    found = [run if isinstance(run, Run) else Run(run) for run in runs]
    rows = {_label(run, found): run.metrics() for run in found}
    missing = [f"{run.dir}: {text}" for run in found if (text := describe(run.dir)["missing"])]
    if missing and not any(rows.values()):
        raise ConfigError(f"plot: no step is logged: {'; '.join(missing)}.")
    return plot(rows, keys, path)


def read_rows(file: Path) -> Rows:
    """The rows of a file with a list of them. Raises: DataError when it is damaged."""
    return Rows(_checked(row, file, dict) for row in _json(file, list))


def _label(run: Run, runs: Sequence[Run]) -> str:
    """The run's name, or its path if another run has the same name."""
    return run.name if [other.name for other in runs].count(run.name) == 1 else str(run.dir)


def _order(best: int | None, worst: int | None, limit: int | None) -> str:
    if best is not None:
        return f" AND r.reward IS NOT NULL ORDER BY r.reward DESC, r.row DESC LIMIT {int(best)}"
    if worst is not None:
        return f" AND r.reward IS NOT NULL ORDER BY r.reward, r.row DESC LIMIT {int(worst)}"
    return " ORDER BY r.row DESC" + (f" LIMIT {int(limit)}" if limit is not None else "")


def _place(row: dict[str, Any]) -> tuple[float, int, int]:
    return (row["step"] or float("inf"), row["group_id"], row["member"])


def _rollouts_of(ledger: LedgerReader, group_id: int) -> Sequence[Rollout]:
    try:
        return ledger.group(group_id).rollouts
    except DataError:  # its tokens are no longer kept
        return ()


def _json(file: Path, kind: type[T]) -> T:
    """The contents of a file. Raises: DataError when it is damaged or cannot be read."""
    return _parsed(_text(file), file, kind)


def _rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file with one per line. Raises: DataError when it is damaged or cannot be read."""
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:  # not splitlines: a text may have line ends of other kinds, such as U+2028
                yield _parsed(line, file, dict)
    except (OSError, UnicodeDecodeError) as cause:
        raise DataError(f"{file}: cannot be read: {reason_of(cause)}") from cause


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as cause:
        raise DataError(f"{file}: cannot be read: {reason_of(cause)}") from cause


def _parsed(text: str, file: Path, kind: type[T]) -> T:
    try:
        value = json.loads(text)
    except ValueError as cause:
        raise DataError(f"{file}: damaged, not JSON: {cause}") from cause
    return _checked(value, file, kind)


def _checked(value: Any, file: Path, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise DataError(f"{file}: damaged: a {type(value).__name__} where a {kind.__name__} belongs.")
    return value


def _version(directory: Path) -> int:
    return int(directory.name.removeprefix("version_"))


def _as_numbers(token_ids: np.ndarray) -> str:
    return " ".join(map(str, token_ids))


def _listed(what: str, numbers: Sequence[int]) -> str:
    """Numbers for a message: `steps 1 to 20`, `steps 1, 5, 9`, `no steps`."""
    if not numbers:
        return f"no {what}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{what} {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:20]))
    return f"{what} {shown}" + (f", ... {numbers[-1]}" if len(numbers) > 20 else "")
