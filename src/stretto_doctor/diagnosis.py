"""Diagnoses learning that goes wrong: warns once per kind of problem, with what to try.

In: one row of metrics per step, held-out rewards of evals. Out: warnings, and at the end whether the reward improved
beyond its noise. The run is not changed. The bounds are wide, so that a run that learns gets no warning.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

WINDOW = 5
"""Steps over which a warning averages, so that one bad batch gives none."""
FLAT_STEPS = 100
"""Steps after which a reward that has not risen gives a warning."""
MISMATCH_BOUND = 0.1  # nats per token; asynchronous runs that learn stay below a third of it
EARLY_STEPS = 20
"""Steps in which one whose mismatch is over the bound shows that the policy moved too far."""
LEAST_ESS, LEAST_TOKEN_ESS = 0.3, 0.9
"""Effective sample sizes of samples and tokens; a batch below both gives a warning. That of samples alone falls with
the length of replies too."""
MOST_GROUP_SUM = 1e-6
"""Sum of a group's advantages, relative to their magnitude, above which it is not rounding."""
SOLVED = 0.9
"""Share of zero-signal groups above which hardly anything is learned."""

FEW = 0.02
"""Mean reward below which hardly any reply is paid, where groups have equal rewards."""
FALLEN = 0.25
"""Share by which a held-out reward has to fall while that of training rises."""

NOT_AS_SAMPLED = ("optim/updates", "optim/dropout")
"""Metrics of steps whose tokens, those of age 0 too, are not trained by the weights that have sampled them: several
updates per step move the policy within it, and dropout changes every pass."""

VITAL = ("loss/mean", "reward/mean", "optim/grad_norm")
"""Metrics without which nothing is learned."""

Row = Mapping[str, float]


@dataclass
class Diagnosis:
    """The steps of a run so far, as far as checks need them, and the kinds of warnings it had."""

    max_completion_tokens: int | None = None  # named in the warning about truncated replies
    steps_before: int = 0  # of the incarnations before a resume
    num_rows: int = 0
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rewards: list[float] = field(default_factory=list)  # finite ones of all steps
    speeds: list[float] = field(default_factory=list)  # tokens per second of all steps
    first_entropy: float = 0.0
    moves: dict[int, float] = field(default_factory=dict)  # mismatch KL over the bound, by early step
    held_out: dict[str, list[float]] = field(default_factory=dict)  # sampled, of each eval, by environment
    warned: set[str] = field(default_factory=set)
    _next_full_check: int = 0  # number of rows; a check of all steps at every step would cost more and more

    def add(self, row: Row) -> list[str]:
        """Add the row of a step and return new warnings."""
        if self.num_rows == 0:
            self.first_entropy = row.get("entropy/mean", 0.0)
        self.num_rows += 1
        self.last.append(row)
        if self.step <= EARLY_STEPS and (moved := row.get("mismatch_kl/mean", 0.0)) > MISMATCH_BOUND:
            self.moves[self.step] = moved
        if math.isfinite(reward := row.get("reward/mean", math.nan)):
            self.rewards.append(reward)
        if "tokens_per_s" in row:
            self.speeds.append(row["tokens_per_s"])
        return self._not_yet_warned(self._problems())

    def add_eval(self, means: Mapping[str, float]) -> list[str]:
        """Add the held-out rewards of an eval, by environment, and return new warnings."""
        for env, mean in means.items():
            self.held_out.setdefault(env, []).append(mean)
        return self._not_yet_warned(self._about_held_out())

    def _not_yet_warned(self, problems: Iterable[tuple[str, str]]) -> list[str]:
        new = [(kind, text) for kind, text in problems if kind not in self.warned]
        self.warned.update(kind for kind, _ in new)
        return [text for _, text in new]

    @property
    def step(self) -> int:
        """The step of the latest row."""
        return self.steps_before + self.num_rows

    def verdict(self) -> str | None:
        """One line about whether the reward rose beyond its noise; None after too few steps."""
        if self.num_rows < 4:
            return None
        first, last, noise = self._first_and_last()
        change = f"training reward {first:.3f} -> {last:.3f} (noise {noise:.3f})"
        if last - first > 2 * noise:
            return f"{change}: improved" + (f", but {fallen}" if (fallen := self._fallen()) else "")
        reasons = {
            "apart": "engine and trainer disagreed about the policy before the first update",
            "numerics": "engine and trainer compute something else for the same weights",
            "decoding": "the engine samples by another distribution than it computes",
            "moved": f"the policy moved too far in {self._early_moves()}",
            "signal": self._one_reward() or self._few_paid() or "most groups have equal rewards, which give no signal",
            "mismatch": "batches came from policies that were too far from the trained one",
            "ess": "batches came from policies that were too far from the trained one",
            "truncated": "most replies are truncated",
            "entropy": "the policy gives nearly the same reply every time",
        }
        likely = list(dict.fromkeys(text for kind, text in reasons.items() if kind in self.warned))
        usual = "too few steps, a learning rate that is too low or too high, tasks that are too hard or too easy"
        word = "fell" if first - last > 2 * noise else "did not improve beyond its noise"
        return f"{change}: {word}; likely: {'; '.join(likely) or usual}"

    def _problems(self) -> Iterator[tuple[str, str]]:
        row = self.last[-1]
        for name in VITAL:
            if not math.isfinite(row.get(name, 0.0)):
                yield (
                    "finite",
                    f"{name} is {row[name]}: the weights are unusable or will be soon. Lower trainer.optim.lr or "
                    "trainer.optim.max_norm, and continue from the last checkpoint.",
                )
        for name, value in row.items():
            if name not in VITAL and math.isnan(value):
                yield (
                    "nan",
                    f"the metric {name} is nan at step {self.step}; `python -m stretto.monitors.catalog` says what "
                    "it is.",
                )
                break
        yield from self._about_invariants(row)
        yield from self._about_first_steps()
        if self.num_rows < WINDOW:
            return
        if (share := self._mean("groups/zero_signal_share")) >= SOLVED:
            yield "signal", self._about_signal(share)
        if not self.moves or self.step > EARLY_STEPS + WINDOW:
            yield from self._about_distance()
        if (truncated := self._mean("completion/truncated_share")) > 0.5:
            limit = f" = {self.max_completion_tokens}" if self.max_completion_tokens else ""
            yield (
                "truncated",
                f"{truncated:.0%} of the replies are truncated at max_completion_tokens{limit} (or seq_len). Raise "
                "it, unless the task needs replies of that length.",
            )
        if self.num_rows >= self._next_full_check:
            self._next_full_check = self.num_rows * 11 // 10 + 1
            yield from self._about_entropy()
            yield from self._about_reward()
            yield from self._about_speed()

    def _about_invariants(self, row: Row) -> Iterator[tuple[str, str]]:
        if lost := row.get("groups/unaccounted"):
            yield (
                "unaccounted",
                f"step {self.step}: {lost:g} groups are neither trained, dropped, failed nor waiting. What is trained "
                "is no longer what was sampled; please report it, with the run's ledger.",
            )
        if (total := row.get("advantage/group_sum", 0.0)) > MOST_GROUP_SUM:
            yield (
                "centered",
                f"step {self.step}: the advantages of a group add up to {total:.2g} of their magnitude, and must to 0: "
                "the group was changed after its advantages were computed, by a hook or a filter.",
            )
        bound, found = row.get("canary/tolerance", 0.0) ** 2, row.get("mismatch_kl/age/0", 0.0)
        is_exact = row.keys().isdisjoint(NOT_AS_SAMPLED)
        if bound and found > bound and is_exact and 1 not in self.moves:
            yield (
                "numerics",
                f"step {self.step}: tokens that the trained version itself has sampled have a mismatch KL of "
                f"{found:.2g} nats, and rounding explains {bound:.2g}. It is not their age: engine and trainer compute "
                "something else for the same weights. Compare dtype, temperature, and what the engine changes in its "
                "distribution.",
            )

        bound, found = row.get("canary/tolerance", 0.0), row.get("canary/rollout_error", 0.0)
        if bound and found > bound:
            yield (
                "decoding",
                f"step {self.step}: a finished rollout that an engine has read again has log-probabilities that differ "
                f"by {found:.2g} nats on average from those with which it was sampled, and rounding explains "
                f"{bound:.2g}. The engine samples by another distribution than it computes: suspect captured graphs, "
                "drafts, its cache, and what it changes in its distribution.",
            )

    def _about_first_steps(self) -> Iterator[tuple[str, str]]:
        if 1 in self.moves:
            yield (
                "apart",
                f"mismatch KL of the first batch is {self.moves[1]:.2g} nats per token, before any update: the engine "
                "computes something else than the trainer. Compare dtype, temperature, and what the engine changes in "
                "its distribution.",
            )
        elif self.moves:
            yield (
                "moved",
                f"the policy moved too far in {self._early_moves()} (mismatch KL {max(self.moves.values()):.2g} nats "
                "per token). Lower trainer.optim.lr, or raise trainer.scheduler.warmup_steps.",
            )

    def _early_moves(self) -> str:
        """The early steps in which the policy moved too far, in words."""
        steps = list(self.moves) or [0]
        return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"

    def _about_distance(self) -> Iterator[tuple[str, str]]:
        if (mismatch := self._mean("mismatch_kl/mean")) > MISMATCH_BOUND:
            yield (
                "mismatch",
                f"mismatch KL is {mismatch:.2g} nats per token (mean of {WINDOW} steps): the trained policy is far "
                "from the one that sampled the tokens. Lower trainer.optim.lr, or max_async_level.",
            )
        samples, tokens = (fmean(row.get(f"ess/{name}", 1.0) for row in self.last) for name in ("rollouts", "tokens"))
        if samples < LEAST_ESS and tokens < LEAST_TOKEN_ESS:
            yield (
                "ess",
                f"a batch is worth {samples:.0%} of its samples (effective sample size, mean of {WINDOW} steps): the "
                "policy has moved far from the ones that sampled. Lower trainer.optim.lr, or max_async_level.",
            )

    def _about_signal(self, share: float) -> str:
        rewards = [row["reward/mean"] for row in self.last if "reward/mean" in row]
        mean = fmean(rewards) if rewards else math.nan
        cause = "The tasks are too easy or too hard for this policy, or the reward is always the same."
        if (same := self._one_reward() or self._few_paid()) is not None:
            asked = "Are they solved, or does the score not look at the reply?"
            if mean <= FEW:
                asked = (
                    "Is no reply right, or does the score not see it, as with the wrong label (`--dry-run` shows one, "
                    "`stretto rollouts` each beside its reply)?"
                )
            cause = f"{same[0].upper()}{same[1:]}. {asked}"
        return (
            f"{share:.0%} of the groups have equal rewards (mean {mean:.3f}, {WINDOW} steps): they give no signal. "
            f"{cause} Look at `stretto rollouts`; try other tasks, a larger group_size, or a reward with more levels."
        )

    def _one_reward(self) -> str | None:
        """That all rollouts of the last steps have the same reward; None if they differ."""
        means = {row.get("reward/mean", math.nan) for row in self.last}
        if len(means) > 1 or any(row.get("reward/std", 1.0) > 0 for row in self.last):
            return None
        return f"every rollout has the reward {means.pop():g}"

    def _few_paid(self) -> str | None:
        """That next to no reply gets a reward, though some do; None if more do."""
        mean = self._mean("reward/mean")
        return f"hardly any reply is paid (mean {mean:.3f})" if 0 < mean <= FEW else None

    def _about_entropy(self) -> Iterator[tuple[str, str]]:
        first, last = self.first_entropy, self._mean("entropy/mean")
        if first > 0.05 and last < 0.02 * first and not self._has_improved():
            yield (
                "entropy",
                f"entropy has fallen from {first:.2g} to {last:.2g} nats per token, and the reward has not risen: the "
                "policy gives nearly the same reply every time. Lower trainer.optim.lr, or raise trainer.loss.kl_tau.",
            )

    def _about_reward(self) -> Iterator[tuple[str, str]]:
        first, last, noise = self._first_and_last()
        if self.num_rows >= 4 * WINDOW and first - last > max(4 * noise, 0.25 * abs(first)):
            yield (
                "fell",
                f"the reward has fallen from {first:.3f} to {last:.3f}. Lower trainer.optim.lr, or continue from an "
                "earlier checkpoint.",
            )
        elif self.num_rows >= FLAT_STEPS and not self._has_improved() and "fell" not in self.warned:
            yield (
                "flat",
                f"the reward has not risen beyond its noise in {self.num_rows} steps ({first:.3f} -> {last:.3f}, "
                f"noise {noise:.3f}). Try another trainer.optim.lr, larger batches, or easier tasks.",
            )

    def _about_held_out(self) -> Iterator[tuple[str, str]]:
        if fallen := self._fallen():
            first, last, _ = self._first_and_last()
            yield (
                "held_out",
                f"the training reward has risen from {first:.3f} to {last:.3f}, but {fallen}. Read replies that are "
                "paid well: `stretto rollouts RUN --best 3`.",
            )

    def _fallen(self) -> str | None:
        """The held-out rewards that fell while that of training rose, and what it means; None if there is none."""
        fallen = [
            f"{env} {means[0]:.3f} -> {means[-1]:.3f}"
            for env, means in self.held_out.items()
            if means[0] - means[-1] > FALLEN * abs(means[0])
        ]
        if not fallen or not self._has_improved():
            return None
        return (
            f"held-out rewards have fallen ({', '.join(fallen)}): the reward may pay for something else than what is "
            "evaluated, or tasks are learned by heart"
        )

    def _about_speed(self) -> Iterator[tuple[str, str]]:
        if len(self.speeds) < 4 * WINDOW:
            return
        usual, now = median(self.speeds), median(self.speeds[-WINDOW:])
        if now < 0.4 * usual:
            yield (
                "speed",
                f"{now:.0f} tokens/s, while this run usually has {usual:.0f}: see `waits` in the step lines, and what "
                "else runs on these machines.",
            )

    def _mean(self, name: str) -> float:
        """Mean over the last steps; 0 if a value is not finite."""
        values = [row.get(name, 0.0) for row in self.last]
        return fmean(values) if all(map(math.isfinite, values)) else 0.0

    def _has_improved(self) -> bool:
        first, last, noise = self._first_and_last()
        return last - first > 2 * noise

    def _first_and_last(self) -> tuple[float, float, float]:
        """Mean reward of the first and last fifth of the steps; standard error of the difference."""
        if len(self.rewards) < 4:
            return 0.0, 0.0, math.inf
        size = max(2, len(self.rewards) // 5)
        # What was before the policy moved too far is in the first batches only.
        parts = self.rewards[: 2 if self.moves else size], self.rewards[-size:]
        # The reward has a trend, so the noise is estimated from differences between successive steps.
        errors = [_noise(part) for part in parts]
        return fmean(parts[0]), fmean(parts[1]), math.hypot(*errors)


def _noise(values: list[float]) -> float:
    """Standard error of the mean, from differences of successive values: var = mean(d^2) / 2."""
    squares = [(b - a) ** 2 for a, b in pairwise(values)]
    return math.sqrt(fmean(squares) / 2 / len(values))
