"""A reply that was interrupted goes on with the same bits; partial rollouts rely on this."""

from __future__ import annotations

import numpy as np
import pytest
from engine_runs import ask, audit, build_core, build_model, prompt, run, submit

from stretto.records.generate import member_seed

pytestmark = pytest.mark.usefixtures("both_engines")

MODEL = build_model()


@pytest.mark.heavy
@pytest.mark.parametrize(("temperature", "top_k", "at"), [(1.0, None, 1), (0.6, 5, 7), (1.0, None, 11)])
def test_every_sample_of_a_group_goes_on_by_itself_bit_for_bit(temperature, top_k, at):
    ids, sampling = prompt(np.random.default_rng(at), 21), {"temperature": temperature, "top_k": top_k}
    [whole] = run(build_core(MODEL), ask("group", ids, n=3, seed=at, **sampling), is_audited=False)
    parts = [
        ask(
            f"rest-{member}", np.concatenate((ids, completion.token_ids[:at])), max_tokens=12 - at,
            seed=member_seed(at, member), **sampling,
        )
        for member, completion in enumerate(whole)
    ]  # fmt: skip
    for completion, [ending] in zip(whole, run(build_core(MODEL, block_size=8), *parts, is_audited=False)):
        assert ending.token_ids.tolist() == completion.token_ids[at:].tolist()
        assert ending.logprobs.tobytes() == completion.logprobs[at:].tobytes()


@pytest.mark.heavy
@pytest.mark.parametrize("num_steps", [0, 1, 2, 9])
def test_an_aborted_group_has_an_answer_a_sample_whatever_its_state(num_steps):
    """Aborted while it waits, in its prompt (in chunks of 16), and while it is decoded."""
    core = build_core(MODEL, max_num_batched_tokens=16)
    ids = prompt(np.random.default_rng(0), 40)
    whole = run(build_core(MODEL), ask("group", ids, n=4, max_tokens=30), is_audited=False)[0]
    [request] = submit(core, ask("group", ids, n=4, max_tokens=30))
    for _ in range(num_steps):
        core.step()
    [ended] = core.abort(["group"])
    assert ended is request and len(ended.completions) == 4
    for completion, full in zip(ended.completions, whole):
        assert completion.finish_reason == "abort"
        assert completion.token_ids.tolist() == full.token_ids[: len(completion.token_ids)].tolist()
        assert bool(len(completion.token_ids)) == (num_steps > 2)
    assert audit(core) == [] and not core.has_work


def test_seeds_of_members_differ():
    seeds = {member_seed(seed, member) for seed in range(50) for member in range(50)}
    assert len(seeds) == 2500 and member_seed(7, 0) == 7 and all(0 <= seed < 2**63 for seed in seeds)
