"""How far generation may be ahead of training: what the config says, in the buffer's own units of groups and steps.

`orchestrator/main.py` builds it, steering replaces its level, and the rules that follow from it are in `buffer.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Bounds:
    """How far generation may run ahead, in groups and steps."""

    groups_per_batch: int
    max_async_level: int
    max_off_policy_steps: int
    max_running_groups: int | None = None
    max_oversampling: float = 4.0
    filter_zero_signal: bool = True
    max_steps: int | None = None
    is_in_dispatch_order: bool = True
    keeps_late: bool = False
    """Without dispatch order: a batch waits for groups that would be too old for later ones."""
    oversampling_factor: float | None = None
    """Fewest batches of groups in flight; None: as many as the steps that generation may be ahead need."""
    tokens_per_batch: int | None = None
    """Tokens with which a batch is complete before it has groups_per_batch groups; None: groups alone count."""
    min_groups: int = 1
    """Fewest groups of a batch that its tokens complete."""
    is_deterministic: bool = False
    sync_interval: int | None = None
    """Steps after which a deterministic run waits for their weights before it plays on."""
    update_interval: int = 1
    """Steps between two versions that engines get."""
    first_version: int = 0
    """The version with which this incarnation of the run begins."""

    @cached_property
    def max_steps_ahead(self) -> int:
        """Steps that generation may be ahead without its groups becoming too old."""
        return min(self.max_async_level, self.max_off_policy_steps)

    @cached_property
    def num_slots(self) -> int:
        """Groups that may run, wait or be in training at once."""
        return int(max(self.max_steps_ahead + 1, self.oversampling_factor or 0) * self.groups_per_batch)

    @cached_property
    def max_replaced(self) -> int:
        """Zero-signal groups that are replaced by other draws, per batch."""
        return int((self.max_oversampling - 1) * self.groups_per_batch) if self.filter_zero_signal else 0

    def num_due(self, left: Mapping[int, int], oldest_version: int) -> int:
        """Groups that the next batch must take, because later ones have no room for so many of their age.

        left: by version of their first token, groups that wait or run. oldest_version: the oldest that the next batch
        may hold. Each later batch has room for groups_per_batch.
        """
        totals = zip(sorted(left), itertools.accumulate(left[version] for version in sorted(left)))
        room = self.groups_per_batch
        due = max((total - max(version - oldest_version, 0) * room for version, total in totals), default=0)
        return min(due, room)

    def room(self, version: int, oldest_version: int) -> int:
        """Groups of a version, or older ones, that batches can take; that of one batch, if it is too old for any."""
        return max(version - oldest_version + 1, 1) * self.groups_per_batch

    def version_of(self, step: int) -> int:
        """The version that plays the batch of `step` in a deterministic run: the oldest that is allowed."""
        synchronised = (step - 1) // self.sync_interval * self.sync_interval if self.sync_interval else 0
        oldest = max(step - 1 - self.max_steps_ahead, synchronised)
        return max(-(-oldest // self.update_interval) * self.update_interval, self.first_version)
