"""How a rollout can end, and what each end means: one table for all environments.

Whoever ends a rollout gives a reason, as plain data: an error carries it (`StrettoError.reason`), a limit of the
episode names it. The player asks `treatment_of` whether the rollout is scored; the ledger stores the reason in a
column; the metrics `outcomes/...` count it. Nothing reads a reason from the text of an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from stretto.base.errors import EngineError, StrettoError

TimeoutIs = Literal["score", "zero", "fail"]


class Reason(StrEnum):
    """Why a rollout ended; a rollout that ended by itself has none."""

    REPLY_CUT = "reply_cut"
    CONTEXT_FULL = "context_full"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    ENV_LIMIT = "env_limit"
    TIME_LIMIT = "time_limit"
    DEADLINE = "deadline"
    NO_REPLY = "no_reply"
    ENV_ERROR = "env_error"
    ENV_HUNG = "env_hung"
    WORKER_LOST = "worker_lost"
    WORKER_HUNG = "worker_hung"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_ERROR = "engine_error"
    ENGINE_LATE = "engine_late"
    CREDIT_ERROR = "credit_error"
    CANCELLED = "cancelled"


class Cause(StrEnum):
    """Whose doing an end is."""

    POLICY = "policy"  # scored, trained, in the baseline
    TIMEOUT = "timeout"  # as the environment's `timeout_is` says
    INFRASTRUCTURE = "infrastructure"  # out of the batch and of the baseline
    USER = "user"  # neither scored nor failed: it is continued after a resume, or dropped with its group


class Treatment(StrEnum):
    """What is done with a rollout that has ended."""

    SCORE = "score"
    ZERO = "zero"
    FAIL = "fail"


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    cause: Cause
    meaning: str
    is_retried: bool = False  # up to max_rollout_retries


OUTCOMES: dict[Reason, Outcome] = {
    Reason.REPLY_CUT: Outcome(Cause.POLICY, "its last reply was cut off at its limit of tokens"),
    Reason.CONTEXT_FULL: Outcome(Cause.POLICY, "its history left no room in seq_len for another reply"),
    Reason.TURN_LIMIT: Outcome(Cause.POLICY, "it had its max_turns"),
    Reason.TOKEN_LIMIT: Outcome(Cause.POLICY, "it had its max_tokens"),
    Reason.ENV_LIMIT: Outcome(Cause.POLICY, "the environment says that one of its own limits ended it"),
    Reason.TIME_LIMIT: Outcome(Cause.TIMEOUT, "it had the timeout_s of its environment"),
    Reason.DEADLINE: Outcome(Cause.TIMEOUT, "rollout_timeout_s ended during a reply that was not its first"),
    Reason.NO_REPLY: Outcome(Cause.INFRASTRUCTURE, "a limit was reached before its first reply", is_retried=True),
    Reason.ENV_ERROR: Outcome(Cause.INFRASTRUCTURE, "the environment raised, or gave no valid result", is_retried=True),
    Reason.ENV_HUNG: Outcome(Cause.INFRASTRUCTURE, "the environment held it at the end of rollout_timeout_s"),
    Reason.WORKER_LOST: Outcome(Cause.INFRASTRUCTURE, "the worker process that played it ended", is_retried=True),
    Reason.WORKER_HUNG: Outcome(Cause.INFRASTRUCTURE, "it blocked its worker, which was killed", is_retried=True),
    Reason.SANDBOX_LOST: Outcome(Cause.INFRASTRUCTURE, "its sandbox was killed, or gave no answer", is_retried=True),
    Reason.ENGINE_ERROR: Outcome(Cause.INFRASTRUCTURE, "an engine failed, or gave no whole reply", is_retried=True),
    Reason.ENGINE_LATE: Outcome(Cause.INFRASTRUCTURE, "rollout_timeout_s ended before its first reply"),
    Reason.CREDIT_ERROR: Outcome(Cause.INFRASTRUCTURE, "an advantage estimator or a hook raised for its group"),
    Reason.CANCELLED: Outcome(Cause.USER, "its group was dropped while it ran"),
}


def treatment_of(reason: Reason, timeout_is: TimeoutIs = "score") -> Treatment:
    """What is done with a rollout that has a result, and did not end by itself."""
    if OUTCOMES[reason].cause is Cause.POLICY:
        return Treatment.SCORE
    return Treatment(timeout_is) if OUTCOMES[reason].cause is Cause.TIMEOUT else Treatment.FAIL


def reason_of(error: StrettoError) -> Reason:
    """The reason that an error carries, else that of its class."""
    if error.reason is not None:
        return Reason(error.reason)
    return Reason.ENGINE_ERROR if isinstance(error, EngineError) else Reason.ENV_ERROR
