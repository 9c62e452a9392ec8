"""What rollouts and examples are like: lengths, turns, waits, and how many groups have signal.

They come from the command line, from the ledger of an earlier run, or from the first prompts and examples of the
config, if its tokenizer and environment or data are on this machine. Nothing is downloaded. The rest is assumed, and
the plan says why.

A distribution is one number (a constant), `MEDIAN:SIGMA` (log-normal), or the values of a run.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto import addons
from stretto.base.errors import ConfigError, StrettoError
from stretto.base.paths import RunDir
from stretto.chat.render import Renderer
from stretto.config.root import RLConfig, SFTConfig
from stretto.config.sections.orchestrator import EnvSection
from stretto.config.sections.sft import PREFERENCE, EnvData, PreferenceData, RewardSection, SourceData
from stretto.data.hub_model import find_local, is_hub_name
from stretto.envs.base import RunInfo, needs_worker, tasks_of
from stretto.ledger.reader import LedgerReader
from stretto.ledger.schema import ENV_S

NUM_PROMPTS, NUM_EXAMPLES = 64, 512
"""How many prompts and examples of a config are rendered, at most."""
MOST_VALUES = 4096
"""Lengths are drawn from this many of a run's newest rollouts."""
LEAST_WAIT_S = 0.005
"""Shorter waits of an environment, on average, are its work in the orchestrator, which is counted there."""


@dataclass(frozen=True)
class Numbers:
    """A distribution: log-normal around a median, or the values of a run."""

    median: float = 0.0
    sigma: float = 0.0
    values: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str, name: str) -> Numbers:
        """From `NUMBER` or `MEDIAN:SIGMA`.

        Raises: ConfigError.
        """
        median, _, sigma = text.partition(":")
        try:
            found = cls(float(median), float(sigma or 0.0))
        except ValueError:
            found = cls(-1.0)
        if not (found.median >= 0 and found.sigma >= 0 and math.isfinite(found.median + found.sigma)):
            raise ConfigError(f"{name} {text!r}: give a number, or MEDIAN:SIGMA of a log-normal distribution")
        return found

    def draw(self, rng: random.Random) -> float:
        """One value."""
        if self.values:
            return rng.choice(self.values)
        return self.median * math.exp(rng.gauss(0.0, self.sigma)) if self.sigma else self.median

    def times(self, factor: float) -> Numbers:
        """The distribution of factor times its values."""
        return Numbers(self.median * factor, self.sigma, tuple(value * factor for value in self.values))

    @property
    def mean(self) -> float:
        if self.values:
            return sum(self.values) / len(self.values)
        return self.median * math.exp(self.sigma**2 / 2)

    def __str__(self) -> str:
        if self.values:
            return f"{len(self.values)} values, mean {self.mean:.4g}"
        return f"{self.median:g}" + (f" (median), log-normal, sigma {self.sigma:g}" if self.sigma else "")


@dataclass(frozen=True)
class Workload:
    """The rollouts of a run. Lengths are in tokens, waits in seconds."""

    prompt_tokens: Numbers
    """Prompt of the first turn."""
    reply_tokens: Numbers
    """Reply of one turn."""
    turns: Numbers = Numbers(1.0)
    observation_tokens: Numbers = Numbers(0.0)
    """What the environment adds between two turns."""
    turn_wait_s: Numbers = Numbers(0.0)
    """How long the environment takes between two turns."""
    score_s: Numbers = Numbers(0.0)
    """How long the environment takes to score a rollout."""
    signal: float = 1.0
    """Share of the groups whose rewards differ."""
    source: str = "given"

    @property
    def is_single_turn(self) -> bool:
        return self.turns == Numbers(1.0)

    def merged(self, most_turns: int) -> Workload:
        """The same with fewer and longer turns, if there are more than most_turns on average."""
        factor = self.turns.mean / most_turns
        if factor <= 1:
            return self
        longer = {
            name: getattr(self, name).times(factor) for name in ("reply_tokens", "observation_tokens", "turn_wait_s")
        }
        return replace(self, turns=self.turns.times(1 / factor), **longer)

    def describe(self) -> list[str]:
        """One line per distribution."""
        lines = [
            f"prompt tokens: {self.prompt_tokens}; reply tokens per turn: {self.reply_tokens} ({self.source})",
            f"share of groups whose rewards differ: {self.signal:.2g}",
        ]
        if not self.is_single_turn:
            lines.append(
                f"turns: {self.turns}; tokens of the environment between turns: {self.observation_tokens}; its wait: "
                f"{self.turn_wait_s} s"
            )
        if self.score_s.mean:
            lines.append(f"seconds until a reward: {self.score_s}")
        return lines


def default_workload(cfg: RLConfig) -> Workload:
    """The workload that is assumed without a run: replies of half their limit, prompts of a quarter of the rest."""
    limit = cfg.orchestrator.train.sampling.max_completion_tokens or cfg.seq_len // 2
    limit = min(limit, cfg.seq_len - 1)
    is_fixed = cfg.orchestrator.train.sampling.ignore_eos
    reply = Numbers(float(limit)) if is_fixed else Numbers(limit / 2, 0.5)
    prompt = max(16.0, min((cfg.seq_len - limit) / 4, 1024.0))
    return Workload(Numbers(prompt), reply, source="assumed from the config; give it, or --from RUN")


def _env_s(metrics: Any) -> float:
    """Seconds of a rollout in its environment; 0 in ledgers of older versions, which do not have them."""
    return float((metrics or {}).get(ENV_S, 0.0))


def with_given(workload: Workload, given: dict[str, str | None]) -> Workload:
    """The workload with what the command line gives, by field.

    Raises: ConfigError.
    """
    changes: dict[str, Any] = {}
    for field, text in given.items():
        if text is None:
            continue
        flag = "--" + field.replace("_", "-")
        numbers = Numbers.parse(text, flag)
        if field == "signal":
            if not 0 < numbers.median <= 1:
                raise ConfigError(f"{flag} {text}: a share above 0 and at most 1")
            changes[field] = numbers.median
        else:
            changes[field] = numbers
    return replace(workload, **changes, source="given") if changes else workload


def workload_of_run(path: Path) -> Workload:
    """The workload of a run, from its ledger.

    Raises: DataError if there is no ledger; ConfigError if nothing was trained.
    """
    query = (
        "SELECT num_turns, num_tokens, num_sampled_tokens, metrics FROM rollouts WHERE status IN "
        f"('finished', 'truncated') AND num_sampled_tokens > 0 ORDER BY row DESC LIMIT {MOST_VALUES}"
    )
    groups = (
        "SELECT max(reward) - min(reward) AS spread FROM rollouts WHERE status IN ('finished', 'truncated') "
        f"GROUP BY group_id ORDER BY group_id DESC LIMIT {MOST_VALUES}"
    )
    with LedgerReader(RunDir(path)) as reader:
        rows = reader.rows(query)
        spreads = [row["spread"] for row in reader.rows(groups) if row["spread"] is not None]
    if not rows:
        raise ConfigError(f"{path}: its ledger has no finished rollout, so it says nothing about their lengths")
    turns = tuple(float(row["num_turns"] or 1) for row in rows)
    replies = tuple(row["num_sampled_tokens"] / (row["num_turns"] or 1) for row in rows)
    others = [row["num_tokens"] - row["num_sampled_tokens"] for row in rows]
    mean_turns = sum(turns) / len(turns)
    # A ledger has no lengths by turn: the rest of a rollout's tokens is spread evenly over its turns.
    parts = tuple(other / turn for other, turn in zip(others, turns))
    is_single = all(turn == 1.0 for turn in turns)
    waits = tuple(_env_s(row["metrics"]) / turn for row, turn in zip(rows, turns))
    # Nor has it waits by turn: the environment's seconds are spread over the turns, the last of which has the reward.
    wait = Numbers(values=waits) if sum(waits) / len(waits) >= LEAST_WAIT_S else Numbers(0.0)
    signal = sum(spread > 0 for spread in spreads) / max(len(spreads), 1)
    return Workload(
        prompt_tokens=Numbers(values=parts),
        reply_tokens=Numbers(values=replies),
        turns=Numbers(1.0) if is_single else Numbers(values=turns),
        observation_tokens=Numbers(0.0 if mean_turns == 1 else sum(parts) / len(parts)),
        turn_wait_s=Numbers(0.0) if is_single else wait,
        score_s=wait,
        signal=max(signal, 0.02),
        source=f"from {path}",
    )


def default_examples(cfg: SFTConfig) -> Numbers:
    """The lengths that are assumed without data: a quarter of seq_len in the median."""
    return Numbers(cfg.seq_len / 4, 0.7)


# -- lengths of a config's own prompts and examples: the first ones are rendered, as a dry run does --


def prompt_lengths(cfg: RLConfig) -> Numbers | str:
    """Tokens of the first prompts of all environments; or why they are not known."""
    from stretto.orchestrator.build import build_policy_renderer, run_info

    if reason := _no_tokenizer(cfg):
        return reason
    own, found = cfg.orchestrator_config(), []
    try:
        renderer = build_policy_renderer(own)
        info = run_info(own, renderer, own.train.sampling, cfg.tokenizer.name or cfg.model.name)
        for section in own.env:
            if section.num_workers or needs_worker(section.id):
                return f"environment {section.name or section.id} runs in processes of its own"
            lengths = asyncio.run(_prompts_of(section, renderer, info))
            if isinstance(lengths, str):
                return lengths
            found += lengths
    except StrettoError as error:
        return str(error)
    return Numbers(values=tuple(found))


async def _prompts_of(section: EnvSection, renderer: Renderer, info: RunInfo) -> list[float] | str:
    from stretto.orchestrator.build import open_env
    from stretto.orchestrator.dry_run import first_prompt

    async with AsyncExitStack() as stack:
        env = open_env(section, Path(), stack, info)
        source = tasks_of(env, "train")
        lengths = []
        for index in range(min(NUM_PROMPTS, source.num_tasks or NUM_PROMPTS)):
            task = source.task(index)
            prompt, tools = await first_prompt(env, task, f"environment {env.name}, task {task.task_id}, prompt")
            if prompt is None:
                return f"environment {env.name} makes its prompts while they are played"
            ids = renderer.encode(prompt) if isinstance(prompt, str) else renderer.render_prompt(prompt, tools)
            lengths.append(float(len(ids)))
        return lengths


def example_lengths(cfg: SFTConfig) -> Numbers | str:
    """Tokens of the first examples, cut at seq_len; or why they are not known."""
    from stretto.orchestrator.build import build_renderer_of, build_scratch_renderer

    if reason := _no_tokenizer(cfg):
        return reason
    data = cfg.data
    if isinstance(data, SourceData):
        for name in [data.name] if isinstance(data.name, str) else data.name:
            if is_hub_name(name) and not Path(name).exists():
                return f"{name} is a data set of the Hub, which a plan does not download"
    if isinstance(data, EnvData):
        data = data.model_copy(update={"num_rows": min(data.num_rows, NUM_EXAMPLES)})
    try:
        if cfg.model.scratch is not None and cfg.tokenizer.name is None:
            renderer = build_scratch_renderer(cfg.model.scratch, cfg.renderer)
        else:
            renderer = build_renderer_of(cfg.model.name, cfg.tokenizer.name, cfg.renderer)
        if isinstance(data, PreferenceData):
            return _pair_lengths(data, cfg, renderer)
        of_sft = addons.load("stretto.sft", "rows", "`sft`")
        rows = itertools.islice(of_sft.read_rows(data, cfg.seed), NUM_EXAMPLES)
        rendered = [of_sft.render_row(row, renderer, cfg.loss_mask) for row in rows]
        lengths = [len(example.token_ids) for each in rendered for example in each.examples]
    except StrettoError as error:
        return str(error)
    return Numbers(values=tuple(float(min(length, cfg.seq_len)) for length in lengths)) if lengths else "no rows"


def _pair_lengths(data: PreferenceData, cfg: SFTConfig, renderer: Renderer) -> Numbers | str:
    """Tokens of the first pairs, both replies with their prompts: a pair is what a step counts."""
    pairs = addons.load("stretto.sft", "preference.rows", PREFERENCE)
    rows = itertools.islice(itertools.chain.from_iterable(pairs.read_pair_rows(data)), NUM_EXAMPLES)
    is_scored = isinstance(cfg.pair_loss, RewardSection)
    rendered = [pairs.render_pair(row, renderer, cfg.loss_mask, is_scored=is_scored) for row in rows]
    lengths = [len(pair) for pair in rendered if not isinstance(pair, str)]
    return Numbers(values=tuple(float(min(length, cfg.seq_len)) for length in lengths)) if lengths else "no rows"


def _no_tokenizer(cfg: RLConfig | SFTConfig) -> str:
    """Why there is no tokenizer here; "" if there is one."""
    name = cfg.tokenizer.name or cfg.model.name
    if cfg.model.scratch is not None and cfg.tokenizer.name is None:
        return ""
    return "" if find_local(name, has_weights=False) is not None else f"the tokenizer of {name} is not here"
