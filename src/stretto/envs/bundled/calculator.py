"""calculator: products of two numbers, and a tool that computes them. Reward 1 for the right result, else 0.

`47*86=` is to be answered by `4042`. The policy may call `calculate` first; the metrics `calls` and `errors` show
whether it learned to. The tool parses its argument and never evaluates it as Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, RolloutResult
from stretto.envs.bundled.held_out import GeneratedTasks, assistant, user
from stretto.envs.multi_turn import Episode, ToolEnv
from stretto.records.rollout import Task

OPERATORS: dict[type, Callable] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_EXPRESSION_CHARS = 64


def calculate(expression: str) -> str:
    """The value of an expression of whole numbers, + - * and brackets."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"longer than {MAX_EXPRESSION_CHARS} characters")
    return str(value_of(ast.parse(expression.strip(), mode="eval").body))


def value_of(node: ast.expr) -> int:
    """The value of a parsed expression.

    Raises: ValueError for anything but whole numbers and + - *.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    raise ValueError("only whole numbers, + - * and brackets")


class Calculator(GeneratedTasks, ToolEnv):
    """Products of two numbers of min_number..max_number."""

    stream = "calculator"

    def __init__(self, min_number: int = 10, max_number: int = 99, seed: int = 0, instruction: str = "") -> None:
        if not min_number >= 0 or max_number - min_number < 7 or max_number > 10**9:
            raise ConfigError(
                f"calculator: min_number = {min_number}, max_number = {max_number} must satisfy "
                "0 <= min_number, min_number + 7 <= max_number <= 10^9."
            )
        self.name = "calculator"
        self.min_number, self.max_number = min_number, max_number
        self.seed = seed
        self.instruction = instruction
        self.tools = (calculate,)

    def make_text(self, entropy: int) -> str:
        span = self.max_number - self.min_number + 1
        entropy, first = divmod(entropy, span)
        return f"{self.min_number + first}*{self.min_number + entropy % span}"

    def task_data(self, text: str) -> dict[str, str]:
        return {"product": text}

    def prompt(self, task: Task) -> list[Message]:
        return [user(f"{self.instruction}{task.data['product']}=")]

    def score(self, episode: Episode) -> RolloutResult:
        last = episode.messages[-1]
        is_answer = last["role"] == "assistant" and not last.get("tool_calls")
        is_right = is_answer and (last.get("content") or "").strip() == calculate(episode.task.data["product"])
        results = [m["content"] for m in episode.messages if m["role"] == "tool"]
        errors = sum(result.startswith("Error") for result in results)
        return RolloutResult(reward=float(is_right), metrics={"calls": float(len(results)), "errors": float(errors)})

    def solve(self, task: Task) -> dict[str, Any]:
        """A row for `sft`, solved with one call."""
        product = task.data["product"]
        function = {"name": "calculate", "arguments": {"expression": product}}
        result = calculate(product)
        messages = [
            *self.prompt(task),
            assistant("") | {"tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "name": "calculate", "content": result},
            assistant(result),
        ]
        return {"messages": messages, "tools": self.tool_schemas()}
