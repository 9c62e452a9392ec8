"""`rl CONFIG --from-ledger RUN`: trains on the stored rollouts of another run, without engines.

A batch is made of the next stored groups, in the order in which they were drawn, and from the beginning again after the
last one. Their tokens keep the log-probabilities that they were sampled with, so that a loss with an importance
ratio sees how far the policy has moved from the one that played them, whatever their age.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from stretto import verbs
from stretto.base.errors import ConfigError, DataError
from stretto.config.reading.plain import PlainParser
from stretto.config.root import RLConfig
from stretto.config.sections.distill import WITHOUT_REWARD
from stretto.ledger.reader import LedgerReader
from stretto.records.rollout import Group, Rollout
from stretto.vime import RolloutFnTrainOutput, Sample
from stretto.vime.convert import sample_of
from stretto_python.run import Run
from stretto_review import scores
from stretto_review.rescore import groups_of, step_range

logger = logging.getLogger(__name__)

FUNCTION = "stretto_review.from_ledger:stored_rollouts"
HOOKS = "orchestrator.hooks"


def parse(verb: str, words: Sequence[str]) -> tuple[None, list[str]]:
    """The words of a config that trains on what a run has stored.

    Raises: ConfigError for another verb than `rl`, and a run without rollouts or scores.
    """
    if verb != "rl":
        raise ConfigError(f"--from-ledger: `{verb}` plays no rollouts; rl can train on stored ones")
    parser = PlainParser("rl", prog="rl --from-ledger", add_help=False)
    parser.add_argument("--from-ledger", dest="run", required=True)
    parser.add_argument("--from-ledger.scores", dest="scores")
    parser.add_argument("--from-ledger.steps", dest="steps", type=_steps, default="1:")
    given, rest = parser.parse_known_args(list(words))
    if unknown := [word for word in rest if word.startswith("--from-ledger")]:
        raise ConfigError(
            f"{unknown[0]}: no flag of --from-ledger; it has --from-ledger.scores and --from-ledger.steps"
        )
    path = Path(given.run).absolute()
    run = Run(path)
    groups_of(run, step_range(given.steps))
    if given.scores:
        scores.load(run.dir, given.scores)
    facts = {"from_ledger": path, "from_ledger_steps": given.steps}
    facts |= {"from_ledger_scores": given.scores} if given.scores else {}
    rest += ["--orchestrator.debug", "training", f"--{HOOKS}.rollout_function", FUNCTION]
    return None, rest + [word for key, value in facts.items() for word in (f"--{HOOKS}.args.{key}", str(value))]


def _steps(text: str) -> str:
    """Steps as they were given. Raises: argparse.ArgumentTypeError if they are none."""
    step_range(text)
    return text


def run(cfg: RLConfig, meant: None) -> int:
    """Train. Raises: ConfigError for a loss that takes old tokens for the policy's own, or needs a teacher."""
    for env in cfg.orchestrator.env:
        if (algo := (env.algo or cfg.orchestrator.algo).type) in WITHOUT_REWARD:
            raise ConfigError(
                f'rl --from-ledger: the algo "{algo}" of {env.name or env.id} learns from a teacher, which scores what '
                "is played; stored rollouts are trained on by their rewards"
            )
    loss = cfg.trainer.loss
    if loss.type == "reinforce" and loss.correction is None:
        raise ConfigError(
            'rl --from-ledger: trainer.loss.type = "reinforce" has no importance ratio, and takes stored tokens for '
            "the policy's own; use another loss, or [trainer.loss.correction]"
        )
    return verbs.run_rl(cfg, [])


def stored_rollouts(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """A batch of stored groups, as a rollout function of vime's: with their tokens, log-probabilities and rewards."""
    if evaluation:
        raise ConfigError("rl --from-ledger has no engines, and so no evals; leave [orchestrator.eval] out")
    name, path, size = getattr(args, "from_ledger_scores", None), args.from_ledger, args.rollout_batch_size
    known, numbers = _usable(path, str(args.from_ledger_steps), name)
    chosen = [numbers[n % len(numbers)] for n in range(rollout_id * size, (rollout_id + 1) * size)]
    with LedgerReader(Run(path).dir) as ledger:
        return RolloutFnTrainOutput(samples=[members_of(ledger.group(number), known) for number in chosen])


@cache
def _usable(path: str, steps: str, name: str | None) -> tuple[dict[scores.Key, float] | None, list[int]]:
    """The scores of this name, and the groups that can be trained: all are read once, so that a resumed run goes on.

    Raises: DataError if there are none.
    """
    run = Run(path)
    known, wanted = scores.load(run.dir, name) if name else None, groups_of(run, step_range(steps))
    with LedgerReader(run.dir) as ledger:
        numbers = [number for number in wanted if _is_usable(ledger, number, known)]
    if not numbers:
        raise DataError(f"{run.dir}: none of its {len(wanted)} groups has two replies that are kept and scored")
    if len(numbers) < len(wanted):
        text = "%s: %d of %d groups have two replies that are kept and scored; the others are left out"
        logger.warning(text, run.dir, len(numbers), len(wanted))
    return known, numbers


def _is_usable(ledger: LedgerReader, number: int, known: dict[scores.Key, float] | None) -> bool:
    try:
        return bool(members_of(ledger.group(number), known))
    except DataError:  # its tokens are no longer kept
        return False


def members_of(group: Group, known: dict[scores.Key, float] | None) -> list[list[Sample]]:
    """The samples of each member that can be trained; [] if there are fewer than two.

    known: scores in place of the rewards.
    """
    found = []
    for rollout in group.rollouts:
        key = (group.group_id, rollout.member)
        if rollout.is_counted and (known is None or key in known):
            scored = rollout if known is None else _with_score(rollout, known[key])
            if samples := [_sample(scored, number) for number, each in enumerate(rollout.branches) if each.is_trained]:
                found.append(samples)
    return found if len(found) > 1 else []


def _with_score(rollout: Rollout, score: float) -> Rollout:
    return replace(rollout, reward=score, branches=tuple(replace(each, reward=None) for each in rollout.branches))


def _sample(rollout: Rollout, number: int) -> Sample:
    sample = sample_of(rollout, "", number)
    sample.group_index = sample.index = sample.rollout_id = None
    sample.weight_versions = []  # versions of the run that played it are none of this one
    return sample
