"""A run's place in the trainer: its requests in the order of their numbers, and its gradients since the last step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.transports.engine.api import Refusal
from stretto_service.config import ServiceSection, UserSection
from stretto_service.store import Run
from stretto_service.training.jobs import Job
from stretto_service.training.journal import REFUSED, Journal


def check_place(section: ServiceSection, owners: Sequence[str], owner: str) -> None:
    """Raises: Refusal 403 if there is no place for one more run; owners: of the runs that have a place."""
    user = section.users.get(owner, UserSection())
    own = sum(each == owner for each in owners)
    if user.max_runs is not None and own >= user.max_runs:
        raise Refusal(f"you have {own} runs, as many as you may (service.users.{owner}.max_runs)", 403)
    if owners and section.full_finetuning:
        raise Refusal(
            "this service trains all weights of one run at a time (service.full_finetuning), and another run has the "
            "place; wait until it ends, or is idle for long enough",
            403,
        )
    if len(owners) >= section.num_places:
        raise Refusal(
            f"all {section.max_concurrent_runs} places of this service are taken (service.max_concurrent_runs); "
            "wait until a run ends, or is idle for long enough",
            403,
        )
    num_without = len(section.users.keys() - {*owners, owner})
    if user.max_runs is None and own and section.num_places - len(owners) <= num_without:
        raise Refusal(
            f"you have {own} runs, and the places that are left are kept for users who have none; wait until a run "
            f"ends, or is idle for long enough, or let the admin set service.users.{owner}.max_runs",
            403,
        )


def creation_answer(run: Run) -> dict[str, Any]:
    """The result of the request that made a run."""
    if run.start is not None:
        return {"model_id": run.id, "path": run.start, "type": "load_weights"}
    return {"model_id": run.id, "type": "create_model"}


@dataclass(eq=False)
class Tenant:
    """A run that has a place in the trainer."""

    run: Run
    journal: Journal
    next_seq: int = 1
    early: dict[int, Job | None] = field(default_factory=dict)
    """Requests that came before one with a lower number; None: one that was not valid."""
    gap_since: float | None = None
    failures: int = 0
    unsaved_steps: int = 0
    unsaved_requests: int = 0
    has_gradients: bool = False
    gradient_bytes: int = 0
    """Size of the requests that added gradients."""
    spoiled: str | None = None
    """Error of a pass that may have added a part of its gradients: a step must not use them."""
    clean_seq: int = 0
    """The last request after which there were no gradients, from which a saved state can continue."""

    def check_gradients(self, job: Job, limit: int) -> None:
        """Raises: Refusal for one more pass if those since the last step have more bytes than `limit`."""
        if job.adds_gradients and self.gradient_bytes > limit:
            raise Refusal(
                f"the passes since the last step have {self.gradient_bytes} bytes, more than the {limit} that one step "
                "may have; make a step"
            )

    def update(self, job: Job) -> None:
        """Update what is known about the gradients by a request that is done."""
        if job.adds_gradients:
            self.has_gradients = True
            self.gradient_bytes += job.num_bytes
        elif job.kind in ("create", "optim_step", "step", "drop"):
            self.has_gradients = False
        elif job.kind in ("load_weights", "load") and job.error is None:
            self.has_gradients, self.spoiled = False, None
        if job.kind in ("optim_step", "step"):
            self.spoiled = None
        if not self.has_gradients:
            self.gradient_bytes = 0
            if job.seq is not None and job.kind != "save_state":
                self.clean_seq = job.seq

    def accept(self, seq: int, job: Job | None, *, is_in_journal: bool = False) -> list[Job]:
        """Accept a request; returns the requests that can be computed now, in order.

        job: None for a request that is refused, whose number cannot be used again.
        """
        if job is None and not is_in_journal:
            self.journal.write(seq, REFUSED, b"")
        self.early[seq] = job
        ready = []
        while self.next_seq in self.early:
            next_job = self.early.pop(self.next_seq)
            self.next_seq += 1
            if next_job is not None:
                ready.append(next_job)
        if not self.early:
            self.gap_since = None
        elif self.gap_since is None:
            self.gap_since = time.monotonic()
        return ready

    def refuse_early(self) -> list[Job]:
        """Refuse the requests that wait for one with a lower number; returns them."""
        refused = [job for job in self.early.values() if job is not None]
        self.early = dict.fromkeys(self.early)
        return refused

    def close_gap(self) -> list[Job]:
        """Refuse the numbers that never came and the requests behind them; returns these requests."""
        last = max(self.early)
        for seq in range(self.next_seq, last + 1):
            self.journal.refuse(seq)
        refused = [job for _, job in sorted(self.early.items()) if job is not None]
        self.early, self.next_seq, self.gap_since = {}, last + 1, None
        return refused
