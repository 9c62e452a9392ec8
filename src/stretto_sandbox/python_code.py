"""python-code: write a function that fits the examples; reward 1 if it passes hidden tests, else 0.

The prompt shows a few examples, `f(3)=6 f(7)=10`, and the reply is an expression in `x`: `x+3`. Any Python expression
is allowed and is run as untrusted code (envs/rewards/sandbox.py). The expected values never enter the sandbox: it
computes, and its output is compared here. With `partial` the reward is the share of tests passed.
"""

from __future__ import annotations

import asyncio
import json
import operator
import random
from collections.abc import Iterable
from typing import Literal

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, RolloutResult, SingleTurnEnv
from stretto.envs.bundled.held_out import SolvedTasks, user
from stretto.records.rollout import Task
from stretto_sandbox.sandbox import Sandbox, SandboxLimits, SandboxResult

HARNESS = """
import json, sys
task = json.load(sys.stdin)
function = eval("lambda x: (" + task["expression"] + "\\n)", {})
for x in task["inputs"]:
    value = function(x)
    print(json.dumps(value if type(value) is int else None))
"""
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_REPLY_CHARS = 2000  # a longer reply is cut before it is run
CACHE_SIZE = 10_000  # replies whose results are cached: a reply computes the same values for every task


class PythonCode(SolvedTasks, SingleTurnEnv):
    """Functions `x+c`, `x-c`, `x*c` with c in 1..max_constant, with num_examples inputs in 0..max_input shown.

    They are tested with the num_tests integers above max_input, which are never shown.
    """

    stream = "code"

    def __init__(
        self,
        operators: str = "+-*",
        max_constant: int = 9,
        max_input: int = 9,
        num_examples: int = 2,
        num_tests: int = 6,
        partial: bool = False,
        backend: Literal["auto", "bubblewrap", "subprocess"] = "auto",
        timeout_s: float = 10.0,
        seed: int = 0,
        instruction: str = "",
    ) -> None:
        if not operators or not set(operators) <= set("+-*"):
            raise ConfigError(f"python-code: operators = {operators!r} must be some of +, - and *.")
        if max_constant < 2 or max_input < 7:
            raise ConfigError(
                f"python-code: max_constant = {max_constant}, max_input = {max_input} make too few tasks; "
                "use at least 2 and 7."
            )
        if not 2 <= num_examples <= max_input or num_tests < 2:
            raise ConfigError(
                f"python-code: num_examples = {num_examples}, num_tests = {num_tests}; use at least 2 of each, "
                "since two points determine a line, and at most max_input examples."
            )
        self.name = "python-code"
        self.operators = operators
        self.max_constant, self.max_input = max_constant, max_input
        self.num_examples = num_examples
        self.test_inputs = range(max_input + 1, max_input + 1 + num_tests)
        self.partial = partial
        self.seed = seed
        self.instruction = instruction
        self.sandbox = Sandbox(SandboxLimits(wall_s=timeout_s), backend=backend)
        self._runs: dict[str, asyncio.Future[SandboxResult]] = {}

    def make_text(self, entropy: int) -> str:
        rng = random.Random(entropy)
        function = f"x{rng.choice(self.operators)}{rng.randint(1, self.max_constant)}"
        shown = rng.sample(range(self.max_input + 1), self.num_examples)
        pairs = zip(shown, values(function, shown))
        return function + " " + " ".join(f"f({x})={y}" for x, y in pairs)

    def task_data(self, text: str) -> dict[str, str]:
        function, _, examples = text.partition(" ")
        return {"function": function, "examples": examples}

    def prompt(self, task: Task) -> list[Message]:
        return [user(self.instruction + task.data["examples"])]

    async def score(self, task: Task, text: str) -> RolloutResult:
        expected = values(task.data["function"], self.test_inputs)
        result = await self._run(text[:MAX_REPLY_CHARS])
        lines = result.stdout.splitlines()
        is_complete = result.is_ok and len(lines) == len(expected)
        share = sum(line == str(value) for line, value in zip(lines, expected)) / len(expected) if is_complete else 0.0
        return RolloutResult(
            reward=share if self.partial else float(share == 1.0),
            metrics={"tests_passed": share, "ran": float(result.is_ok), "killed": float(result.killed_for is not None)},
        )

    async def _run(self, expression: str) -> SandboxResult:
        """The result of the expression for all test inputs; rollouts with the same expression share one run."""
        if (run := self._runs.get(expression)) is None:
            if len(self._runs) >= CACHE_SIZE:
                self._runs.clear()
            request = json.dumps({"expression": expression, "inputs": list(self.test_inputs)})
            run = self._runs[expression] = asyncio.ensure_future(self.sandbox.run(HARNESS, stdin=request))
        try:
            return await asyncio.shield(run)  # if one rollout is cancelled, the others still wait for the run
        finally:
            if run.done() and (run.cancelled() or run.exception()):
                self._runs.pop(expression, None)

    def demonstration(self, task: Task) -> str:
        """The function, which `opsd` shows to the teacher."""
        return task.data["function"]


def values(function: str, inputs: Iterable[int]) -> list[int]:
    """The values of a function of a task, such as `x*2`."""
    compute, constant = OPERATORS[function[1]], int(function[2:])
    return [compute(x, constant) for x in inputs]
