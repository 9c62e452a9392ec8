"""What a frozen model has been asked in a run, over all its starts: counts, costs, and the bound of costs.

The prices are the config's; the tokens are those that the server counts. The loop writes the counts into the ledger
with each step, as the event `models`, from which a resumed run goes on; a run that is killed loses those of one step.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stretto.base.errors import ConfigError
from stretto.config.sections.distill import ModelLimits
from stretto.envs.models import ModelReply

MILLION = 1e6
COUNTS = ("requests", "cached", "failed", "prompt tokens", "completion tokens")
"""What is counted."""


class Spending:
    """What one model has been asked, and what that costs."""

    def __init__(self, name: str, limits: ModelLimits) -> None:
        self.name, self._limits = name, limits
        self.counts: Counter[str] = Counter()
        self.stop: Callable[[str], None] | None = None
        """Ends the run, which is told why; None: nothing runs that could be ended."""

    @property
    def has_price(self) -> bool:
        return self._limits.prompt_price is not None or self._limits.reply_price is not None

    @property
    def cost(self) -> float:
        """In the currency of the prices."""
        prices = {"prompt tokens": self._limits.prompt_price, "completion tokens": self._limits.reply_price}
        return sum(self.counts[what] * (price or 0.0) / MILLION for what, price in prices.items())

    @property
    def excess(self) -> str | None:
        """Why nothing more may be asked; None if it may."""
        most = self._limits.max_cost
        if most is None or self.cost < most:
            return None
        return (
            f"models.{self.name} has cost {self.cost:.4g}, and models.{self.name}.client.max_cost = {most:g}; raise it "
            "and go on with --resume"
        )

    async def admit(self) -> None:
        """Let a request begin, if the bound allows it. Otherwise end the run, and wait to be cancelled.

        Raises: ConfigError if there is no run that could be ended.
        """
        if (reason := self.excess) is None:
            return
        if self.stop is None:
            raise ConfigError(reason)
        self.stop(reason)
        await asyncio.Event().wait()

    def add(self, reply: ModelReply) -> None:
        """Count the tokens of a reply.

        Raises: ConfigError if they have a price and the server does not count them.
        """
        if self.has_price and not reply.num_prompt_tokens:
            raise ConfigError(
                f"models.{self.name}: the server does not count the tokens of a request (usage), so its cost "
                "cannot be counted; remove prompt_price, reply_price and max_cost"
            )
        self.counts["prompt tokens"] += reply.num_prompt_tokens
        self.counts["completion tokens"] += reply.num_completion_tokens

    def gauges(self) -> dict[str, float]:
        """The metrics of the model."""
        name, counts = self.name, self.counts
        values = {
            f"models/{name}/requests": counts["requests"],
            f"models/{name}/cached": counts["cached"],
            f"models/{name}/failed": counts["failed"],
            f"models/{name}/prompt_tokens": counts["prompt tokens"],
            f"models/{name}/completion_tokens": counts["completion tokens"],
        }
        cost = {f"models/{name}/cost": self.cost} if self.has_price else {}
        return {metric: float(value) for metric, value in values.items()} | cost

    def summary(self) -> str:
        """What was asked, for the log; "" if nothing was."""
        if not self.counts:
            return ""
        texts = [f"{self.counts[what]} {what}" for what in COUNTS if self.counts[what]]
        return ", ".join([*texts, f"cost {self.cost:.4g}"] if self.has_price else texts)


def restore(models: Iterable[Spending], events: Sequence[Mapping[str, Any]]) -> None:
    """Go on from the counts of earlier starts: the last of these events.

    Raises: ConfigError if a model has cost what it may.
    """
    newest = ([{}, *events])[-1]
    for spending in models:
        spending.counts.update(newest.get(spending.name, {}))
        if (reason := spending.excess) is not None:
            raise ConfigError(reason)
