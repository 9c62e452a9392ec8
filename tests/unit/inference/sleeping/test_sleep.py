"""An embedded engine that sleeps: its memory is given back, and it answers as before when it is awake."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_runs import ask, audit, build_core, run
from tiny import build_policy

from stretto.models.hub import export_tensors

PROMPT = np.arange(2, 14, dtype=np.int32)


def answer(core, name):
    (completion,) = run(core, ask(name, PROMPT, n=1, max_tokens=8, temperature=0.0))[0]
    return completion.token_ids.tolist()


@pytest.mark.parametrize("keeps", [True, False])
def test_an_engine_that_has_slept_answers_as_before(keeps):
    core = build_core(build_policy(3))
    before = answer(core, "a")
    assert core.put_away(keeps_weights=keeps) > 0 and core.are_weights_away
    assert not core.bring_back(["weights"]) and not core.are_weights_away
    if not keeps:
        core.load_weights(1, ((name, t.clone()) for name, t in export_tensors(build_policy(3))))
    assert core.bring_back(["kv_cache"])
    assert answer(core, "b") == before and not audit(core)


def test_weights_of_the_deepest_sleep_are_those_of_the_next_version():
    core, other = build_core(build_policy(3)), build_core(build_policy(4))
    core.put_away(keeps_weights=False)
    core.bring_back(["weights"])
    with torch.no_grad():
        core.load_weights(1, export_tensors(build_policy(4)))
    assert core.bring_back(["weights", "kv_cache"])
    assert answer(core, "a") == answer(other, "a")
