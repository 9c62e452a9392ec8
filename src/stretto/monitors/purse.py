"""What a run has used over all its starts, the bounds of [budget], and the forecast of its end.

A run ends within one step of a bound. What is under way counts: no batch is begun while those before it are expected to
reach a bound, by the longest of the latest steps (`spent_after`). Times are those of the clock that is given; the time
between two starts of a run does not count, and a run that is killed loses what came after its last step.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stretto.base.errors import ConfigError
from stretto.base.status import duration, quantity
from stretto.config.sections.run import BudgetSection
from stretto.monitors.file import newest_row

HOUR_S = 3600.0
MILLION = 1e6
WINDOW = 20  # steps whose mean is the forecast's
LATEST = 5  # steps whose longest one says whether another may begin
METRICS = {"seconds": "budget/hours", "trained": "budget/tokens", "sampled": "budget/sampled_tokens"}
"""The metric of each field of Used that is counted in every run."""


@dataclass(frozen=True)
class Used:
    """What a run has used over all its starts."""

    seconds: float = 0.0
    trained: int = 0
    """Tokens of trained batches, prompts included."""
    sampled: int = 0
    """Tokens that the policy sampled in rollouts that have ended, trained or not."""
    models_cost: float = 0.0
    """Cost of the frozen models that environments ask."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Used:
        """What `as_dict` wrote; fields that are missing are 0."""
        fields = asdict(cls())
        return cls(**{name: type(empty)(saved.get(name, empty)) for name, empty in fields.items()})

    @classmethod
    def of_metrics(cls, row: Mapping[str, Any]) -> Used:
        """What a row of metrics says was used up to then."""
        found = {name: row.get(metric, 0) for name, metric in METRICS.items()}
        return cls.of(found | {"seconds": found["seconds"] * HOUR_S})

    def as_dict(self) -> dict[str, float]:
        """The fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class Forecast:
    """Where the budget ends if the coming steps use what the latest ones did on average."""

    key: str
    """The bound that is reached first."""
    last_step: int
    left_s: float

    def __str__(self) -> str:
        return f"budget.{self.key} ends the run at about step {self.last_step}, in {duration(self.left_s)}"


class Purse:
    """Counts what a run uses. `clock` is in seconds; it begins to count when the purse is made."""

    def __init__(
        self, budget: BudgetSection | None, before: Used = Used(), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        budget = budget or BudgetSection()
        self._bounds, self._prices = budget.bounds, budget.prices
        self._has_prices, self.has_bounds = budget.prices.is_any, bool(budget.bounds)
        self.saved: dict[str, float] = before.as_dict()
        """What was used up to the latest step."""
        self._clock, self._since, self._used = clock, clock() - before.seconds, before
        self._steps: deque[tuple[int, Used]] = deque([(0, before)], maxlen=WINDOW + 1)

    @property
    def used(self) -> Used:
        """What has been used up to now."""
        return replace(self._used, seconds=self._clock() - self._since)

    def begin(self, step: int) -> None:
        """Steps are counted from this one, which was trained last; what came before was the start of the run."""
        self._steps.clear()
        self._steps.append((step, self.used))

    def end_step(self, step: int, num_tokens: int, sampled: int = 0, models_cost: float = 0.0) -> dict[str, float]:
        """Count a trained step of so many tokens; its metrics.

        sampled: tokens of rollouts that have ended meanwhile; models_cost: of frozen models, in all.
        """
        trained, sampled = self._used.trained + num_tokens, self._used.sampled + sampled
        self._used = replace(self._used, trained=trained, sampled=sampled, models_cost=models_cost)
        self._steps.append((step, self.used))
        self.saved = self.used.as_dict()
        return self._metrics()

    # -- bounds --

    def cost(self, used: Used) -> float:
        """In the currency of the prices."""
        prices = self._prices
        tokens = (used.sampled * prices.sampled_tokens + used.trained * prices.trained_tokens) / MILLION
        return used.seconds / HOUR_S * prices.hour + tokens + used.models_cost

    def amounts(self, used: Used) -> dict[str, float]:
        """How much of what each key bounds has been used."""
        return {"max_hours": used.seconds / HOUR_S, "max_tokens": float(used.trained), "max_cost": self.cost(used)}

    def excess(self, used: Used | None = None) -> str | None:
        """Why the run ends now, or would if this were used; None if it goes on."""
        return reached(self._bounds, self.amounts(used or self.used))

    def __str__(self) -> str:
        """The bounds in words, for a dry run."""
        bounds = self._bounds
        words = {"max_hours": "{:g} h", "max_tokens": "{:,.0f} trained tokens", "max_cost": "a cost of {:g}"}
        return "ends at " + " or ".join(words[key].format(bound) for key, bound in bounds.items())

    def check(self) -> None:
        """Raises: ConfigError if a bound is reached before the run starts."""
        amounts = self.amounts(self.used)
        if (reason := reached(self._bounds, amounts)) is not None:
            words = " ".join(larger_bounds(self._bounds, amounts))
            raise ConfigError(f"{reason}; raise it, or leave it out; twice as much is {words}")

    def larger(self) -> str:
        """The words that double every bound that is reached; of none, that of which the largest share is used."""
        shares = self._shares(self.used)
        key = max(shares, key=shares.__getitem__)
        return " ".join(larger_bounds(self._bounds, self.amounts(self.used), also=[key]))

    def spent_after(self, num_steps: int, num_tokens: int) -> Used:
        """What is expected to be used once num_steps, of num_tokens in all, that are under way are trained."""
        used, recent = self.used, list(self._steps)[-LATEST - 1 :]
        longest = max((b.seconds - a.seconds for (_, a), (_, b) in itertools.pairwise(recent)), default=0.0)
        since = used.seconds - recent[-1][1].seconds
        ahead_s = max(longest * num_steps - since, 0.0)
        return replace(used, seconds=used.seconds + ahead_s, trained=used.trained + num_tokens)

    @property
    def has_timed_a_step(self) -> bool:
        """Whether this start of the run knows how long a step takes."""
        return len(self._steps) > 1

    def seconds_left(self) -> float:
        """Seconds after which time alone reaches a bound; infinite if it reaches none."""
        bounds, prices, now = self._bounds, self._prices, self.used
        left = [bounds["max_hours"] * HOUR_S - now.seconds] if "max_hours" in bounds else []
        if "max_cost" in bounds and prices.hour:
            left.append((bounds["max_cost"] - self.cost(now)) / prices.hour * HOUR_S)
        return max(min(left, default=math.inf), 0.0)

    # -- reports --

    def _metrics(self) -> dict[str, float]:
        used = self.used
        found = {"budget/hours": used.seconds / HOUR_S, "budget/tokens": float(used.trained)}
        found["budget/sampled_tokens"] = float(used.sampled)
        if self._has_prices or used.models_cost:
            found["budget/cost"] = self.cost(used)
        if shares := self._shares(used):
            found["budget/share"] = max(shares.values())
        if (forecast := self.forecast()) is not None:
            found["budget/last_step"] = float(forecast.last_step)
        return found

    def forecast(self) -> Forecast | None:
        """Where the budget ends; None without bounds, or before a step."""
        (first, then), (last, now) = self._steps[0], self._steps[-1]
        if last <= first or not self.has_bounds:
            return None
        before, amounts, found = self.amounts(then), self.amounts(now), []
        for key, bound in self._bounds.items():
            per_step = (amounts[key] - before[key]) / (last - first)
            if per_step > 0:
                steps = max(math.ceil((bound - amounts[key]) / per_step), 0)
                found.append((steps, key))
        if not found:
            return None
        steps, key = min(found)
        return Forecast(key, last + steps, steps * (now.seconds - then.seconds) / (last - first))

    def summary(self) -> dict[str, Any]:
        """What was used, for summary.json."""
        used = self.used
        cost = {"cost": self.cost(used)} if self._has_prices or used.models_cost else {}
        return {"hours": used.seconds / HOUR_S, "tokens": used.trained, "sampled_tokens": used.sampled, **cost}

    def _shares(self, used: Used) -> dict[str, float]:
        amounts = self.amounts(used)
        return {key: amounts[key] / bound for key, bound in self._bounds.items()}


def used_by_metrics(file: Path) -> Used:
    """What a run has used by its newest row of metrics; nothing if there is no file."""
    return Used.of_metrics(newest_row(file, METRICS["seconds"])) if file.exists() else Used()


def amounts_of_summary(summary: Mapping[str, Any]) -> dict[str, float]:
    """How much of what each key bounds a run had used when it wrote its summary."""
    used = summary.get("used") or {}
    return {f"max_{name}": float(used.get(name, 0.0)) for name in ("hours", "tokens", "cost")}


def reached(bounds: Mapping[str, float], amounts: Mapping[str, float]) -> str | None:
    """Which bound of [budget] is reached, the first of several, and by what; None if none is."""
    for key, bound in bounds.items():
        if amounts[key] >= bound:
            return f"budget.{key} = {bound:g}, and the run has used {_shown(key, amounts[key])}"
    return None


def larger_bounds(bounds: Mapping[str, float], amounts: Mapping[str, float], also: Collection[str] = ()) -> list[str]:
    """The words that double each bound that is reached, or what was used of it if that is more.

    also: keys whose bounds are raised in any case.
    """
    keys = [key for key, bound in bounds.items() if key in also or amounts[key] >= bound]
    return [larger_bound(key, max(bounds[key], amounts[key])) for key in keys]


def larger_bound(key: str, bound: float) -> str:
    """The words of a command line that double a bound of [budget]."""
    value = f"{2 * bound:.0f}" if key == "max_tokens" else f"{2 * bound:g}"
    return f"--budget.{key.replace('_', '-')} {value}"


def _shown(key: str, amount: float) -> str:
    if key == "max_hours":
        return f"{amount:.4g} h"
    return f"{quantity(amount)} tokens" if key == "max_tokens" else f"{amount:.4g}"
