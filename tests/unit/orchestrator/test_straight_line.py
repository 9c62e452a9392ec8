"""The way of a rollout through the code is straight: how often does a reader who follows a step change the file?

Counted is one step of one group of four rollouts, from the moment at which the pipeline starts until the run has ended:
every time that the interpreter enters a named function of src/stretto (a call, or a coroutine or generator that goes
on after it waited) whose file is not that of the function entered before. Lambdas and comprehensions do not count, nor
does the event loop of the tests (virtual_clock.py), which is asyncio's in a run.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

import stretto
from stretto.base import aio

SOURCE = Path(stretto.__file__).parent
MAX_CHANGES = 120
OF_TESTS = "virtual_clock.py"
"""The file that only tests enter."""


def entered_functions(path: Path) -> list[tuple[str, str]]:
    """File and name of each function that one step of four rollouts enters, in order."""
    entered: list[tuple[str, str]] = []

    def on_call(frame, event, _) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{SOURCE}/") or code.co_qualname.endswith(">"):
            return
        if (file := code.co_filename.removeprefix(f"{SOURCE}/")) != OF_TESTS:
            entered.append((file, code.co_qualname))

    async def run_under_watch(run, *args) -> None:
        sys.setprofile(on_call)
        await run(*args)

    async def watch(loop) -> None:
        loop._pipeline.run = partial(run_under_watch, loop._pipeline.run)

    settings = config(path, batch_size=4, max_steps=1)
    try:
        train(settings, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=1), meanwhile=watch)
    finally:
        sys.setprofile(None)
    return entered


def changes_of(entered: list[tuple[str, str]]) -> Counter[str]:
    """How often each change of file happens."""
    return Counter(f"{a} -> {b}" for (a, _), (b, _) in pairwise(entered) if a != b)


def test_one_step_changes_the_file_fewer_than_120_times(tmp_path, monkeypatch):
    monkeypatch.setattr(aio, "SLICE_S", math.inf)  # a busy machine would cut work into more slices
    entered = entered_functions(tmp_path)
    changes = changes_of(entered)
    most = ", ".join(f"{count} {change}" for change, count in changes.most_common(10))
    assert changes.total() < MAX_CHANGES, f"{changes.total()} changes of file; most often {most}"
    assert ("orchestrator/groups/buffer.py", "Buffer.complete") in entered, "the group was played under watch"
