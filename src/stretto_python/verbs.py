"""`stretto.rl`, `sft` and `evaluate`: the verbs for scripts and notebooks, each in processes of its own.

A call becomes a configuration (given/settings.py), its objects files of the run directory (given/files.py), and the
verb is started with them (started.py, live.py) as it is from a shell: `rl @ RUN/given/config.json` starts the same run
again.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.files import holder
from stretto.config.load import read
from stretto.config.root import EvalConfig, RLConfig, RunRoot, SFTConfig
from stretto_python.given.files import Given, placed
from stretto_python.given.settings import Call, call_of
from stretto_python.live import Live
from stretto_python.rows import Rows
from stretto_python.run import Run, read_rows
from stretto_python.started import Started

if TYPE_CHECKING:
    from typing import TypeAlias

    import datasets
    import pandas
    import polars
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stretto.config.section import Section
    from stretto.envs.base import Environment

    Config: TypeAlias = Mapping[str, Any] | Section | Path | str
    Model: TypeAlias = str | Path | Run | PreTrainedModel | Mapping[str, Any]
    Tokenizer: TypeAlias = str | Path | PreTrainedTokenizerBase
    Env: TypeAlias = str | type | Callable[..., Environment] | Environment | Mapping[str, Any]
    Rowed: TypeAlias = Sequence[Mapping[str, Any]] | datasets.Dataset | pandas.DataFrame | polars.DataFrame
    Records: TypeAlias = str | Path | Rowed
    Reward: TypeAlias = str | Callable[..., Any]

ROOTS: dict[str, type[RunRoot]] = {"rl": RLConfig, "sft": SFTConfig, "evaluate": EvalConfig}


def rl(
    *config: Config,
    model: Model | None = None,
    env: Env | Sequence[Env] | None = None,
    dataset: Records | None = None,
    eval_dataset: Records | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    tokenizer: Tokenizer | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    group_size: int | None = None,
    max_completion_tokens: int | None = None,
    eval_steps: int | None = None,
    name: str | None = None,
    wait: bool = True,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Train by reinforcement learning, and return the run.

        stretto.rl(model="Qwen/Qwen3-0.6B", env=MyEnv, steps=30, lr=1e-5)
        stretto.rl(model=MODEL, dataset=rows, reward=score, eval_dataset=held_out)
        stretto.rl("rl.toml", {"trainer.optim.lr": 1e-5}, env=MyEnv)

    config: files, then dicts laid over them (nested, or with dotted keys), then flags as on the command line.
    env: an environment's class, instance, a function that makes one, its name, an entry of the configuration
    ({"id": MyEnv, "args": {...}}), or a list of these.
    dataset, eval_dataset: records, with the prompt in the column `prompt` (or `question`), the answer in `label`,
    `answer` or `solution`; the held-out ones are evaluated.
    reward: "exact", "math", or a function: `(completion, answer)` of one reply, `(prompts, completions, **columns)` of
    all replies to a prompt. Several, names too, are summed with reward_weights.
    model: a name, directory, earlier run or object, or the section {"name": ..., "lora": {...}}.
    steps, lr, batch_size, group_size, max_completion_tokens, eval_steps, name: max_steps, trainer.optim.lr,
    orchestrator.batch_size, orchestrator.group_size, orchestrator.train.sampling.max_completion_tokens,
    orchestrator.eval.interval, run.name.
    wait: False returns while it runs; see Run.wait and Run.stop. The run ends with this process.
    progress: show how far it is: a bar and a curve in a notebook, its lines in a script.
    settings: sections of the configuration as dicts, and clean=True, resume=True, dry_run=True.

    Ctrl-C lets the run finish its step and save a checkpoint; the second time it ends at once.

    Raises: ConfigError when an argument or the configuration is wrong, EngineError when the run fails.
    """
    return _train("rl", config, _keywords(locals()), wait, progress)


def sft(
    *config: Config,
    model: Model | None = None,
    dataset: Records | None = None,
    eval_dataset: Records | None = None,
    tokenizer: Tokenizer | None = None,
    steps: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    eval_steps: int | None = None,
    name: str | None = None,
    wait: bool = True,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Supervised fine-tuning; the arguments are those of `rl`.

    dataset: records with `messages`, with `prompt` and `completion`, or with a prompt and an answer.
    eval_dataset: records on which the loss is measured every eval_steps.

    Raises: ConfigError when an argument or the configuration is wrong, EngineError when the run fails.
    """
    return _train("sft", config, _keywords(locals()), wait, progress)


def evaluate(
    *config: Config,
    model: Model | None = None,
    env: Env | Sequence[Env] | None = None,
    dataset: Records | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    tokenizer: Tokenizer | None = None,
    num_examples: int | None = None,
    group_size: int | None = None,
    max_completion_tokens: int | None = None,
    name: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> Rows:
    """Evaluate a model on held-out tasks; one row per environment and mode (sampled, greedy).

    model: a name, directory or object, or a run, whose newest weights are evaluated. The other arguments are those of
    `rl`; `dataset` has the records that are evaluated, num_examples says how many, group_size the replies to each.

    Raises: ConfigError when an argument or the configuration is wrong, EngineError when the evaluation fails.
    """
    keywords, given = _keywords(locals()), Given()
    call = call_of("evaluate", config, keywords, given)
    root, words, is_start = _prepared(call, given)
    file = root.run_path / "eval.json"
    file.unlink(missing_ok=True)
    started = Started("eval", words, in_python, has_status=is_start)
    live = Live(started, root.run_dir, is_shown=progress, is_printed=not is_start)
    live.wait()
    return read_rows(file) if file.exists() else Rows()


def _keywords(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call that were given."""
    named = {name: each for name, each in arguments.items() if name not in ("config", "settings", "wait", "progress")}
    return {name: each for name, each in (named | arguments["settings"]).items() if each is not None}


def _train(verb: str, config: Sequence[Any], keywords: Mapping[str, Any], wait: bool, progress: bool) -> Run:
    given = Given()
    call = call_of(verb, config, keywords, given)
    root, words, is_start = _prepared(call, given)
    live = Live(Started(verb, words, in_python), root.run_dir, is_shown=progress, is_printed=not is_start)
    if wait or not is_start:
        live.wait()
    else:
        live.begin()
    return Run(root.run_dir.path, live)


def in_python(text: str) -> str:
    """A message with keywords in place of the flags that a run is started with; commands in it stay as they are."""
    if "\n" in text:
        return "\n".join(map(in_python, text.split("\n")))
    if re.match(r"\s*\S*(rl|sft|stretto \w+) @ ", text):
        return text
    for flag, keyword in (("--resume", "resume=True"), ("--clean", "clean=True"), ("--run.name", "name=")):
        text = re.sub(rf"(?<!\S){re.escape(flag)}(?=[\s,;.]|$)(?!\.\w)", keyword, text)
    return text


def _prepared(call: Call, given: Given) -> tuple[RunRoot, list[str], bool]:
    """The checked configuration, the words after the verb, and whether a run is started (and not shown or planned).

    The files of the call are written into the run directory.

    Raises: ConfigError for a configuration that is wrong, or the directory of another run.
    """
    before = [word for file in call.files for word in ("@", file)]
    cls, verb = ROOTS[call.verb], call.verb
    with tempfile.TemporaryDirectory(prefix="stretto-given-") as trial:
        values = placed(call.values, trial)
        given.write(Path(trial), values, is_trial=True)
        root = read(cls, [*before, *call.flags], values, verb=f"stretto.{verb}")
    is_start = not (root.dry_run or root.print_config)
    run = root.run_dir
    if is_start and verb != "evaluate":
        try:
            rundir.check(run, **root.start_options)
        except ConfigError as error:
            raise ConfigError(in_python(str(error))) from None
        if (pid := holder(run.lock)) is not None:
            raise ConfigError(f"{run} is the directory of a run that goes on, process {pid}; stop it, or give name=")
    if root.clean or (is_start and root.resume is None):
        shutil.rmtree(run.given, ignore_errors=True)
    if not call.values:
        return root, [*before, *call.flags], is_start
    name = {"run": {**call.values.get("run", {}), "name": root.run_name}}
    inside = f"{{output_dir}}/{root.run_name}/{run.given.name}"
    path = given.write(run.given, placed(call.values | name, inside))
    shown = os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
    return root, [*before, "@", shown, *call.flags], is_start
