"""python-code: write a function that the examples describe; reward 1 if it passes hidden tests, else 0.

The prompt is a few examples, `f(0)=1 f(1)=3`, and the reply is an expression in `x`: `2*x+1`. Anything Python
accepts there may be written, and is run as untrusted code (envs/sandbox.py). The values wanted never enter
the sandbox: it computes, and what it prints is compared here. `partial` pays the share of tests passed.
"""

from __future__ import annotations

import json

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, RolloutResult, SingleTurnEnv, Split, TaskSource
from stretto.envs.held_out import draw_held_out
from stretto.envs.sandbox import Limits, Sandbox
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
NUM_REMEMBERED = 10_000  # replies whose verdict is kept: members of a group often say the same


class PythonCode(SingleTurnEnv):
    """Linear functions `a*x+b`, a in 1..max_factor, b in 0..max_offset, given by num_examples examples."""

    def __init__(
        self,
        max_factor: int = 5,
        max_offset: int = 39,
        num_examples: int = 2,
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
        if num_examples < 2 or num_tests < 1:
            raise ConfigError(
                f"python-code: num_examples = {num_examples}, num_tests = {num_tests}; a line needs two points, "
                "and a reward one test."
            )
        self.name = "python-code"
        self.max_factor, self.max_offset = max_factor, max_offset
        self.num_examples, self.num_tests = num_examples, num_tests
        self.partial = partial
        self.seed = seed
        self.instruction = instruction
        self.sandbox = Sandbox(Limits(wall_s=timeout_s), backend=backend)
        self._verdicts: dict[tuple[str, str], RolloutResult] = {}

    def tasks(self, split: Split) -> TaskSource:
        def make(index: int) -> Task:
            function = self._draw(f"{split}/{self.seed}", index, is_eval=split == "eval")
            return Task(env=self.name, task_id=f"{split}-{index}", data={"function": function})

        return TaskSource(make)

    def prompt(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": self._question(task.data["function"])}]

    async def score(self, task: Task, text: str) -> RolloutResult:
        known = (task.data["function"], text)
        if known not in self._verdicts:
            if len(self._verdicts) >= NUM_REMEMBERED:
                self._verdicts.clear()
            self._verdicts[known] = await self._test(task, text)
        return self._verdicts[known]

    async def _test(self, task: Task, text: str) -> RolloutResult:
        inputs = range(self.num_tests)
        wanted = values(task.data["function"], inputs)
        request = json.dumps({"expression": text[:LONGEST], "inputs": list(inputs)})
        result = await self.sandbox.run(HARNESS, stdin=request)
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

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        """Solved tasks of the train side."""
        rows = []
        for index in range(num_rows):
            function = self._draw(f"sft/{self.seed}/{seed}", index, is_eval=False)
            user = {"role": "user", "content": self._question(function)}
            rows.append({"messages": [user, {"role": "assistant", "content": function}]})
        return rows

    def _question(self, function: str) -> str:
        shown = range(self.num_examples)
        return self.instruction + " ".join(f"f({x})={y}" for x, y in zip(shown, values(function, shown)))

    def _draw(self, stream: str, index: int, *, is_eval: bool) -> str:
        def make(entropy: int) -> str:
            entropy, factor = divmod(entropy, self.max_factor)
            return f"{factor + 1}*x+{entropy % (self.max_offset + 1)}"

        return draw_held_out(f"code/{stream}", index, is_eval=is_eval, make=make)


def values(function: str, inputs: range) -> list[int]:
    """Values of one of our own functions, `2*x+1`."""
    factor, offset = map(int, function.split("*x+"))
    return [factor * x + offset for x in inputs]
