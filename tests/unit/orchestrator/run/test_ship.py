"""What the metrics of a step say about drafts."""

from __future__ import annotations

import pytest

from stretto.orchestrator.run.ship import speculation_metrics


def totals(drafts: int, drafted: int, accepted: int, passes: int = 0, on: int = 0) -> dict[str, float]:
    """The metrics of engines whose drafts have at most two tokens."""
    first = min(drafts, accepted)
    values = {
        "num_drafts_total": drafts, "num_draft_tokens_total": drafted, "num_accepted_tokens_total": accepted,
        "num_accepted_tokens_per_pos_total/0": first, "num_accepted_tokens_per_pos_total/1": accepted - first,
        "num_passes_total": passes, "num_passes_on_total": on,
    }  # fmt: skip
    return {f"vllm:spec_decode_{name}": float(value) for name, value in values.items()}


def test_metrics_of_drafts_are_those_since_the_last_reading() -> None:
    found = speculation_metrics(totals(100, 200, 100, 1000, 100), totals(120, 240, 130, 1040, 130))
    assert found == pytest.approx(
        {
            "speculation/acceptance": 0.75, "speculation/accepted_length": 1.5, "speculation/on_share": 0.75,
            "speculation/accepted_at/0": 1.0, "speculation/accepted_at/1": 0.5,
        }
    )  # fmt: skip


def test_engines_that_do_not_draft_have_no_such_metrics() -> None:
    assert speculation_metrics({}, {"vllm:generation_tokens_total": 5.0}) == {}


@pytest.mark.parametrize("now", [totals(550, 1100, 90), totals(400, 900, 900), totals(10, 20, 10)])
def test_totals_that_have_lost_an_engine_tell_nothing(now) -> None:
    """One has left or begun anew; differences would give a share of more than 1, or of 0."""
    assert speculation_metrics(totals(500, 1000, 100), now) == {}
