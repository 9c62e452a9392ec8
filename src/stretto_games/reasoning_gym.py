"""reasoning-gym: any generator of that package (the extra `reasoning-gym`) as a single-turn environment.

Questions come from the generator, rewards from its own scorer. The hash of a question decides whether it is held
out, so that none is in both splits even if the generator repeats itself. If a scorer raises, the rollout fails; a
generator whose scorer can block should run in worker processes (`num_workers`).
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import re
from dataclasses import fields
from hashlib import blake2b
from typing import Any

from stretto.base.errors import ConfigError, EnvError
from stretto.envs.base import Message, RolloutResult, SingleTurnEnv, Split, TaskSource
from stretto.records.rollout import Task

logger = logging.getLogger(__name__)

EVAL_SHARE = 4
"""One question in this many is held out."""
MAX_ATTEMPTS = 64
"""Questions that are tried until one belongs to the split."""
SIZE = 10_000_000
"""Number of different questions to request from a generator; after that they repeat."""
_SIZES = {"acre": 1000, "word_ladder": 1000}
"""Sizes of generators that make all of their questions in advance."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAGS = "Think as long as you need to. Give your final answer, and nothing else, between <answer> and </answer>."


class ReasoningGym(SingleTurnEnv):
    """Questions of the generator `dataset`, scored by its own scorer; `settings` are the generator's.

    answer_format `tags`: the system prompt asks for <answer>...</answer>, and a reply without it scores 0; `plain`:
    the whole reply is the answer. system_prompt replaces that system prompt ("" for none). num_tasks: tasks in each
    split, None for no end.
    """

    def __init__(
        self,
        dataset: str,
        num_tasks: int | None = None,
        seed: int = 0,
        answer_format: str = "tags",
        system_prompt: str | None = None,
        size: int | None = None,
        **settings: Any,
    ) -> None:
        if answer_format not in ("tags", "plain"):
            raise ConfigError(f"reasoning-gym: answer_format = {answer_format!r}; use 'tags' or 'plain'.")
        if num_tasks is not None and (not isinstance(num_tasks, int) or num_tasks < 1):
            raise ConfigError(f"reasoning-gym: num_tasks = {num_tasks!r}; use a whole number above 0.")
        self.name = f"reasoning-gym/{dataset}"
        self.num_tasks, self.answer_format = num_tasks, answer_format
        self.system_prompt = system_prompt
        if system_prompt is None and answer_format == "tags":
            self.system_prompt = _TAGS
        self._size = size or _SIZES.get(dataset, SIZE)
        self._dataset = make_dataset(dataset, seed=seed, size=self._size, **settings)
        self._has_warned = False
        self.entry = functools.lru_cache(maxsize=4096)(self._entry)

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            entry = self.entry(split, index)
            data = {"split": split, "index": index, "question": entry["question"], "answer": entry["answer"]}
            return Task(env=self.name, task_id=f"{split}-{index}", data=json.loads(json.dumps(data, default=str)))

        return TaskSource(make, self.num_tasks)

    def prompt(self, task: Task) -> list[Message]:
        question: list[Message] = [{"role": "user", "content": task.data["question"]}]
        return [{"role": "system", "content": self.system_prompt}, *question] if self.system_prompt else question

    def score(self, task: Task, text: str) -> RolloutResult:
        """The generator's own score, 0 to 1.

        Raises: EnvError if the scorer raises, or the question is not the one that was drawn.
        """
        answer = self.answer_in(text)
        if answer is None:
            return RolloutResult(reward=0.0, metrics={"has_answer": 0.0})
        entry = self.entry(task.data["split"], task.data["index"])
        if entry["question"] != task.data["question"]:
            raise EnvError(
                f"{self.name}: task {task.task_id} is not the question that was drawn; this generator gives "
                "different questions in different processes."
            )
        try:
            reward = float(self._dataset.score_answer(answer=answer, entry=entry))
        except Exception as cause:  # the boundary of a foreign scorer
            what = f"its scorer raised {type(cause).__name__}: {cause}"
            raise EnvError(f"{self.name}: {what}; the answer was {answer[:80]!r}") from cause
        return RolloutResult(reward=reward, metrics={"has_answer": 1.0})

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Questions of the training split with the generator's answers.

        Raises: ConfigError if it has no answers, as for questions with many solutions.
        """
        source = self.tasks("train")
        tasks = [source.make(((seed + 1) << 32) + index) for index in range(num_rows)]
        if any(task.data["answer"] is None for task in tasks):
            raise ConfigError(f"{self.name} has no answers, only a scorer; use another environment for SFT.")
        form = "<answer>{}</answer>" if self.answer_format == "tags" else "{}"
        return [
            {"messages": [*self.prompt(t), {"role": "assistant", "content": form.format(t.data["answer"])}]}
            for t in tasks
        ]

    def answer_in(self, text: str) -> str | None:
        """The answer in a reply; None if it has none."""
        if self.answer_format == "plain":
            return text.strip()
        found = _ANSWER.findall(text)
        return found[-1].strip() if found else None

    def _entry(self, split: Split, index: int) -> dict[str, Any]:
        """Question `index` of one split: the first of MAX_ATTEMPTS pseudo-random ones that belongs to it."""
        entry: dict[str, Any] = {}
        for attempt in range(MAX_ATTEMPTS):
            entry = self._dataset[_question_index(split, index, attempt) % self._size]
            if is_held_out(entry["question"]) == (split == "eval"):
                return entry
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s has too few different questions to hold some out: training and evaluation share them", self.name
            )
        return entry


def make_dataset(name: str, **settings: Any) -> Any:
    """A generator of reasoning-gym.

    Raises: ConfigError if it is not installed, has no such generator, or the settings do not fit.
    """
    try:
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != "reasoning_gym":
            raise
        raise ConfigError(
            "environment 'reasoning-gym' needs the extra of that name: pip install 'stretto[reasoning-gym]'"
        ) from cause
    if name not in DATASETS:
        nearest = difflib.get_close_matches(str(name), DATASETS, n=1)
        suggestion = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(sorted(DATASETS))}."
        raise ConfigError(f"reasoning-gym has no generator dataset = {name!r}; {suggestion}")
    known = [each.name for each in fields(DATASETS[name][1])]
    if unknown := sorted(set(settings) - set(known)):
        nearest = difflib.get_close_matches(unknown[0], known, n=1)
        suggestion = f"did you mean {nearest[0]!r}?" if nearest else ""
        settable = ", ".join(each for each in known if each not in ("seed", "size")) or "none"
        raise ConfigError(
            f"reasoning-gym: generator {name!r} has no setting {unknown[0]!r}; "
            f"{suggestion} its settings are {settable}."
        )
    try:
        if isinstance(settings.get("datasets"), list):  # the setting of the generator `composite`
            settings["datasets"] = [DatasetSpec(**{"config": {}, **each}) for each in settings["datasets"]]
        return create_dataset(name, **settings)
    except Exception as cause:  # the boundary of a foreign constructor, which uses asserts
        raise ConfigError(f"reasoning-gym: generator {name!r} refuses these settings: {cause}") from cause


def is_held_out(question: str) -> bool:
    """Is this question held out?"""
    return int.from_bytes(blake2b(question.encode(), digest_size=8).digest(), "little") % EVAL_SHARE == 0


def _question_index(split: Split, index: int, attempt: int) -> int:
    if split == "train" and attempt == 0:
        return index
    place = f"{split}/{index}/{attempt}".encode()
    return int.from_bytes(blake2b(place, digest_size=8).digest(), "little")
