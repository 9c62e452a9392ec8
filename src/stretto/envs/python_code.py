"""python-code: write a function that the examples describe; reward 1 if it passes hidden tests, else 0.

The prompt is a few examples, `f(0)=1 f(1)=3`, and the reply is an expression in `x`: `2*x+1`. Anything Python
accepts there may be written, and is run as untrusted code (envs/sandbox.py). The values wanted never enter
the sandbox: it computes, and what it prints is compared here. `partial` pays the share of tests passed.
"""

from __future__ import annotations

import asyncio
import json

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, RolloutResult, SingleTurnEnv, Split, TaskSource
from stretto.envs.held_out import draw_held_out
from stretto.envs.sandbox import Limits, Sandbox, SandboxResult
from stretto.records.rollout import Task

HARNESS = """
import json, sys
task = json.load(sys.stdin)
function = eval("lambda x: (" + task["expression"] + "\\n)", {})
for x in task["inputs"]:
    value = function(x)
    print(json.dumps(value if type(value) is int else None))
"""
LONGEST = 2000  # characters of a reply worth running
NUM_REMEMBERED = 10_000  # replies whose values are kept: what one computes is the same for every task


class PythonCode(SingleTurnEnv):
    """Linear functions `a*x+b`, a in 1..max_factor, b in 0..max_offset.

    Shown are num_examples values of each, at 0, example_step, and so on; tested is at 0, 1, ...
    """

    def __init__(
        self,
        max_factor: int = 9,
        max_offset: int = 99,
        num_examples: int = 2,
        example_step: int = 10,
        num_tests: int = 6,
        partial: bool = False,
        backend: str = "auto",
        timeout_s: float = 2.0,
        seed: int = 0,
        instruction: str = "",
    ) -> None:
        if max_factor < 1 or max_offset < 0 or max_factor * (max_offset + 1) < 32:
            raise ConfigError(
                f"python-code: max_factor = {max_factor}, max_offset = {max_offset} make fewer than 32 functions."
            )
        if num_examples < 2 or example_step < 1 or num_tests < 1:
            raise ConfigError(
                f"python-code: num_examples = {num_examples}, example_step = {example_step}, num_tests = "
                f"{num_tests}; a line needs two points, and a reward one test."
            )
        self.name = "python-code"
        self.max_factor, self.max_offset = max_factor, max_offset
        self.shown = range(0, num_examples * example_step, example_step)
        self.num_tests = num_tests
        self.partial = partial
        self.seed = seed
        self.instruction = instruction
        self.sandbox = Sandbox(Limits(wall_s=timeout_s), backend=backend)
        self._runs: dict[str, asyncio.Future[SandboxResult]] = {}

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            function = self._draw(f"{split}/{self.seed}", index, is_eval=split == "eval")
            return Task(env=self.name, task_id=f"{split}-{index}", data={"function": function})

        return TaskSource(make)

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": self._question(task.data["function"])}]

    async def score(self, task: Task, text: str) -> RolloutResult:
        wanted = values(task.data["function"], range(self.num_tests))
        result = await self._run(text[:LONGEST])
        lines = result.stdout.splitlines()
        is_whole = result.is_ok and len(lines) == len(wanted)
        share = (
            sum(line == str(value) for line, value in zip(lines, wanted)) / len(wanted) if is_whole else 0.0
        )
        return RolloutResult(
            reward=share if self.partial else float(share == 1.0),
            metrics={
                "tests_passed": share,
                "ran": float(result.is_ok),
                "killed": float(result.killed_for is not None),
            },
        )

    async def _run(self, expression: str) -> SandboxResult:
        """What the expression computes at all inputs of the tests: one process, and one run for all who ask."""
        if (run := self._runs.get(expression)) is None:
            if len(self._runs) >= NUM_REMEMBERED:
                self._runs.clear()
            request = json.dumps({"expression": expression, "inputs": list(range(self.num_tests))})
            run = self._runs[expression] = asyncio.ensure_future(self.sandbox.run(HARNESS, stdin=request))
        try:
            return await asyncio.shield(run)  # whoever is cancelled, the others still wait for it
        finally:
            if run.done() and (run.cancelled() or run.exception()):
                self._runs.pop(expression, None)

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Solved tasks of the train side."""
        rows = []
        for index in range(num_rows):
            function = self._draw(f"sft/{self.seed}/{seed}", index, is_eval=False)
            user = {"role": "user", "content": self._question(function)}
            rows.append({"messages": [user, {"role": "assistant", "content": function}]})
        return rows

    def _question(self, function: str) -> str:
        pairs = zip(self.shown, values(function, self.shown))
        return self.instruction + " ".join(f"f({x})={y}" for x, y in pairs)

    def _draw(self, stream: str, index: int, *, is_eval: bool) -> str:
        def make(entropy: int) -> str:
            entropy, factor = divmod(entropy, self.max_factor)
            return f"{factor + 1}*x+{entropy % (self.max_offset + 1)}"

        return draw_held_out(f"code/{stream}", index, is_eval=is_eval, make=make)


def values(function: str, inputs: range) -> list[int]:
    """Values of one of our own functions, `2*x+1`."""
    factor, offset = map(int, function.split("*x+"))
    return [factor * x + offset for x in inputs]
