"""`stretto export RUN --kind best`: rollouts as data for supervised fine-tuning, rejection sampling and preferences.

    rollouts   every finished rollout: text, tokens, log-probabilities, rewards, advantage
    sft        those with at least --min-reward, as messages
    best       of each group the best, as messages
    pairs      of each group the best and the worst, as prompt, chosen and rejected (TRL's preference format)

Equal replies of a group are written once in `sft`. A conversation of one turn has the messages of its task, others have
those that the marks of the chat template show in the tokens; with --text there is text as the policy saw it instead.

A reply that a limit has cut did not come to its end, and messages cannot say so: the chat template ends each. It is no
row of `sft` and `best`, and `pairs` mark it, so that its end is not trained.

With --held-out a share of the prompts, always the same ones, is written into a second file: no prompt is in both.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from stretto import state
from stretto.base.errors import ConfigError, DataError
from stretto.base.files import atomic_path
from stretto.base.status import harmless
from stretto.chat.placeholders import PLACEHOLDER, one_per_image
from stretto.chat.render import Renderer
from stretto.config.reading.plain import PlainParser
from stretto.ledger.reader import LedgerReader
from stretto.records.rollout import Branch, Group, Rollout, RolloutStatus
from stretto.vime.convert import response_start
from stretto_python.run import Run
from stretto_review import scores
from stretto_review.judging import Replies
from stretto_review.recorded import make_parent
from stretto_review.rescore import groups_of, step_range
from stretto_view.roles import stretches, without_end

NO_THOUGHT = re.compile(r"\A\s*<think>\s*</think>\s*")
"""What a template writes before a reply without a thought: it is none of the message, and is written again."""
Row = dict[str, Any]
Message = dict[str, Any]


@dataclass
class Chosen:
    """A run's groups as rows; `left_out` counts rollouts and groups that give none, by the reason."""

    replies: Replies
    min_reward: float | None
    margin: float
    is_text: bool
    scores: dict[scores.Key, float] | None = None
    per_group: int = 1
    steps: dict[int, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)

    def scored(self, group: Group) -> list[tuple[float, Rollout]]:
        """The finished rollouts of a group that have a reply, with their rewards or the scores in their place."""
        found = []
        for rollout in group.rollouts:
            reward = rollout.reward
            if not rollout.is_counted or not any(branch.is_sampled.any() for branch in rollout.branches):
                self.left_out["failed, dropped or without a reply"] += 1
            elif self.scores is not None and (rollout.group_id, rollout.member) not in self.scores:
                self.left_out["without a score of that name"] += 1
            else:
                reward = reward if self.scores is None else self.scores[rollout.group_id, rollout.member]
                found.append((reward, rollout))
        return found

    def is_cut(self, rollout: Rollout) -> bool:
        """Whether its last reply was cut at a limit: it was sampled up to the end of its tokens, and did not end."""
        branch = last_branch(rollout)
        is_open = bool(branch.is_sampled[-1]) and int(branch.token_ids[-1]) not in self.replies.renderer.stop_ids
        return rollout.status is RolloutStatus.TRUNCATED and is_open

    def ended(self, group: Group) -> list[tuple[float, Rollout]]:
        """Good ones that came to their end."""
        good = self.good(group)
        found = [each for each in good if not self.is_cut(each[1])]
        self.left_out["cut at a limit of tokens"] += len(good) - len(found)
        return found

    def good(self, group: Group) -> list[tuple[float, Rollout]]:
        """Those with at least the wanted reward."""
        found = self.scored(group)
        enough = [each for each in found if self.min_reward is None or each[0] >= self.min_reward]
        self.left_out["with less than --min-reward"] += len(found) - len(enough)
        return enough

    def text_of(self, rollout: Rollout) -> tuple[str, str]:
        """The text before the first sampled token, and all after it."""
        branch, decode = last_branch(rollout), self.replies.renderer.decode
        start = response_start(branch)
        return one_per_image(decode(branch.token_ids[:start])), one_per_image(decode(branch.token_ids[start:]))

    def reply_of(self, token_ids: np.ndarray) -> Message:
        """The message of a reply; with a call that is none, such as a cut one, it is the text as it was sampled."""
        renderer = self.replies.renderer
        message = renderer.parse(token_ids)
        if "unparsed_tool_calls" not in message:
            return message
        return {"role": "assistant", "content": without_end(renderer.decode(token_ids))}

    def messages_of(self, rollout: Rollout) -> tuple[list[Message], list[Message]]:
        """The messages of the prompt, and those from the first reply on.

        Raises: DataError if the tokens have no marks of a chat template.
        """
        branch, asked = last_branch(rollout), rollout.task.data.get("prompt")
        if rollout.num_turns <= 1 and isinstance(asked, list):
            return asked, [self.reply_of(branch.token_ids[response_start(branch) :])]
        prompt, reply = self.text_of(rollout)
        found = [(each.role, without_end((prompt + reply)[each.body : each.end])) for each in stretches(prompt + reply)]
        messages = [
            {"role": role, "content": NO_THOUGHT.sub("", text) if role == "assistant" else text}
            for role, text in found
            if role != "text" and text
        ]
        first = next((n for n, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
        if not first or first == len(messages):
            raise DataError(
                f"rollout {rollout.rollout_id}: its tokens show no messages of a prompt and a reply; use --text"
            )
        return messages[:first], messages[first:]


def last_branch(rollout: Rollout) -> Branch:
    """The last trained branch with a reply."""
    sampled = [each for each in rollout.branches if each.is_sampled.any()]
    return ([each for each in sampled if each.is_trained] or sampled)[-1]


def _facts(chosen: Chosen, reward: float, rollout: Rollout) -> Row:
    step = chosen.steps.get(rollout.group_id)
    facts = {"group": rollout.group_id, "member": rollout.member, "step": step, "env": rollout.task.env}
    return {**facts, "task_id": rollout.task.task_id, "reward": reward}


def _of_rollouts(chosen: Chosen, group: Group) -> Iterator[Row]:
    advantages = {each.member: value for each, value in zip(group.rollouts, group.advantages)}
    for reward, rollout in chosen.good(group):
        branch = last_branch(rollout)
        prompt, reply = chosen.text_of(rollout)
        yield {
            **_facts(chosen, reward, rollout),
            "advantage": advantages[rollout.member],
            "status": str(rollout.status),
            "label": rollout.task.data.get("label"),
            "prompt": prompt,
            "reply": reply,
            "version": rollout.first_version,
            "temperature": branch.temperature,
            "token_ids": branch.token_ids.tolist(),
            "is_sampled": branch.is_sampled.tolist(),
            "logprobs": [None if math.isnan(each) else each for each in branch.logprobs.tolist()],
        }


def _conversation(chosen: Chosen, reward: float, rollout: Rollout) -> Row:
    if chosen.is_text:
        prompt, completion = chosen.text_of(rollout)
        return {"prompt": prompt, "completion": completion, **_facts(chosen, reward, rollout)}
    before, after = chosen.messages_of(rollout)
    return {"messages": [*before, *after], **_facts(chosen, reward, rollout)}


def _of_sft(chosen: Chosen, group: Group) -> Iterator[Row]:
    seen = set()
    for reward, rollout in chosen.ended(group):
        tokens = last_branch(rollout).token_ids.tobytes()
        if tokens in seen:
            chosen.left_out["equal to another of their group"] += 1
            continue
        seen.add(tokens)
        yield _conversation(chosen, reward, rollout)


def _of_best(chosen: Chosen, group: Group) -> Iterator[Row]:
    if found := chosen.ended(group):
        yield _conversation(chosen, *max(found, key=lambda each: each[0]))


def _of_pairs(chosen: Chosen, group: Group) -> Iterator[Row]:
    """The best with the worst, the second best with the second worst, and so on; a rollout is in one pair at most."""
    found = chosen.scored(group)
    if not found:
        return
    ranked = sorted(found, key=lambda each: -each[0]), sorted(found, key=lambda each: each[0])
    enough = [
        (good, bad)
        for good, bad in zip(*ranked)
        if good[0] > bad[0]
        and good[0] - bad[0] >= chosen.margin
        and (chosen.min_reward is None or good[0] >= chosen.min_reward)
    ]
    if not enough:
        chosen.left_out["groups without a pair that differs enough"] += 1
    for (high, best), (low, worst) in enough[: chosen.per_group]:
        if np.array_equal(last_branch(best).token_ids, last_branch(worst).token_ids):
            chosen.left_out["pairs of equal replies"] += 1
            continue
        kept, refused = map(chosen.text_of if chosen.is_text else chosen.messages_of, (best, worst))
        facts = _facts(chosen, high, best) | {"rejected_member": worst.member, "rejected_reward": low}
        facts |= {"chosen_is_cut": chosen.is_cut(best), "rejected_is_cut": chosen.is_cut(worst)}
        yield {"prompt": kept[0], "chosen": kept[1], "rejected": refused[1], **facts}


def is_held_out(group: Group, share: float, renderer: Renderer) -> bool:
    """Whether the prompt of a group belongs to the held-out ones: it depends on its tokens and images alone."""
    branches = [branch for rollout in group.rollouts for branch in rollout.branches if branch.is_sampled.any()]
    if not branches:
        return False
    prompt = branches[0].token_ids[: int(branches[0].is_sampled.argmax())]
    images = branches[0].images
    shown = one_per_image(renderer.decode(prompt)).count(PLACEHOLDER) if images else 0
    crc = zlib.crc32(prompt.astype(np.int32).tobytes())
    for image in images[:shown]:
        crc = zlib.crc32(image.hash.encode(), crc)
    return crc < share * 2**32


KINDS: dict[str, Callable[[Chosen, Group], Iterator[Row]]] = {
    "rollouts": _of_rollouts,
    "sft": _of_sft,
    "best": _of_best,
    "pairs": _of_pairs,
}


def _write_jsonl(path: Path, rows: Iterable[Row]) -> int:
    count = 0
    with atomic_path(path) as part, part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterable[Row]) -> int:
    pyarrow, parquet = _library("pyarrow", "parquet"), _library("pyarrow.parquet", "parquet")
    table = pyarrow.Table.from_pylist(list(rows))
    with atomic_path(path) as part:
        parquet.write_table(table, part)
    return int(table.num_rows)


def _write_hf(path: Path, rows: Iterable[Row]) -> int:
    data = _library("datasets", "hub").Dataset.from_list(list(rows))
    with atomic_path(path) as part:
        data.save_to_disk(str(part))
    return len(data)


FORMATS: dict[str, tuple[str, Callable[[Path, Iterable[Row]], int]]] = {
    "jsonl": (".jsonl", _write_jsonl),
    "parquet": (".parquet", _write_parquet),
    "hf": ("", _write_hf),
}
"""The end of a file's name, and what writes it; hf: a directory of `datasets.save_to_disk`."""


def _library(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as cause:
        raise ConfigError(
            f"this format needs {cause.name}: pip install 'stretto[{extra}]'; or use --format jsonl"
        ) from None


def export(words: Sequence[str]) -> int:
    """Write rollouts of a run as data; exit status 1 if none fits, or none is held out."""
    args = _parse(words)
    run = Run(args.run)
    groups = groups_of(run, args.steps)
    end, write = FORMATS[args.format]
    path = Path(args.out) if args.out else run.path / "exports" / f"{args.kind}{end}"
    held_out = path.with_name(f"{path.stem}-held-out{path.suffix}")
    paths = [path] if args.held_out is None else [path, held_out]
    for each in paths:
        if each.exists() and (args.format == "hf" or not each.is_file()):
            raise ConfigError(f"--out {each}: there is something already; name another place")
    make_parent(path)
    chosen = Chosen(Replies(run), args.min_reward, args.margin, args.text, per_group=args.per_group)
    chosen.scores = scores.load(run.dir, args.scores) if args.scores else None
    rows = _rows(run, groups, chosen, KINDS[args.kind])
    if args.held_out is None:
        counts = [write(path, (row for _, row in rows))]
    else:
        parts: tuple[list[Row], list[Row]] = ([], [])
        for group, row in rows:
            parts[is_held_out(group, args.held_out, chosen.replies.renderer)].append(row)
        counts = [write(*each) for each in zip(paths, parts)]
    left = ", ".join(f"{number} {reason}" for reason, number in sorted(chosen.left_out.items()) if number)
    written = ", ".join(f"{count} rows: {each}" for count, each in zip(counts[1:], paths[1:]))
    text = f"{counts[0]} rows of {len(groups)} groups: {path}" + (f"\nheld out: {written}" if written else "")
    print(harmless(text + (f"\nleft out: {left}" if left else "") + _warning(args.held_out, counts, held_out)))
    return 0 if all(counts) else 1


def _warning(share: float | None, counts: Sequence[int], held_out: Path) -> str:
    """What is wrong with the files for training on one and validating on the other; "" if nothing is."""
    if share is None:
        way = "is of an earlier export, and its prompts may be among these rows: remove it, or give --held-out again"
        return f"\nNOTE: {held_out} {way}" if held_out.exists() else ""
    if any(counts) and not all(counts):
        what, way = ("holds out no prompt", "larger") if counts[0] else ("holds out every prompt", "smaller")
        return f"\n--held-out {share:g} {what}; the run has few of them: give a {way} share, or export more steps"
    return ""


def _rows(
    run: Run, groups: Sequence[int], chosen: Chosen, make: Callable[[Chosen, Group], Iterator[Row]]
) -> Iterator[tuple[Group, Row]]:
    with LedgerReader(run.dir) as ledger:
        found = ledger.rows("SELECT DISTINCT group_id, step FROM live_rollouts")
        chosen.steps = {row["group_id"]: row["step"] for row in found}
        for group_id in groups:
            try:
                group = ledger.group(group_id)
            except DataError:
                chosen.left_out["groups whose tokens are no longer kept"] += 1
                continue
            for row in make(chosen, group):
                yield group, row


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; give one such as 0.5")
    return number


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the prompts; give a number between 0 and 1")
    return share


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of pairs; give 1 or more")
    return int(text)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = PlainParser("export", "Write rollouts of a run as data to train on.", missing=state.runs_here)
    parser.add_argument("run", help="run directory, such as outputs/demo")
    parser.add_argument("--kind", choices=list(KINDS), default="rollouts", help="what a row is (rollouts)")
    parser.add_argument("--format", choices=list(FORMATS), default="jsonl", help="jsonl, or with extras parquet and hf")
    parser.add_argument("--out", metavar="PATH", help="file or directory (RUN/exports/KIND)")
    parser.add_argument(
        "--steps", type=step_range, metavar="A:B", help="rollouts that these steps trained on; default: all"
    )
    parser.add_argument(
        "--min-reward", type=_number, metavar="R", help="with at least this reward; of a pair the better one"
    )
    parser.add_argument(
        "--margin", type=_number, default=0.0, metavar="M", help="least difference of a pair's rewards (0)"
    )
    parser.add_argument(
        "--per-group",
        type=_count,
        default=1,
        metavar="N",
        help="pairs of a group at most: second best with second worst",
    )
    parser.add_argument(
        "--held-out",
        type=_share,
        metavar="SHARE",
        help="share of the prompts that goes into a second file, PATH-held-out",
    )
    parser.add_argument("--scores", metavar="NAME", help="scores of `rescore --write NAME` in place of the rewards")
    parser.add_argument("--text", action="store_true", help="text with special tokens in place of messages")
    args = parser.parse_args(list(words))
    if args.kind == "sft" and args.min_reward is None:
        raise ConfigError("stretto export --kind sft: from which reward on? Give --min-reward R")
    if args.kind != "pairs" and (args.per_group, args.margin) != (1, 0.0):
        raise ConfigError(
            f"stretto export --kind {args.kind}: --per-group and --margin are of --kind pairs; leave them out"
        )
    return args
