r"""arithmetic: small sums; the reply must end in `\boxed{...}`. Reward 1 for the right value, else 0.

`3+14-5=` is answered by `\boxed{12}`, or by an equal expression such as `\boxed{24/2}`. The answer is verified by
envs/rewards/math_reward.py, like answers to questions of any dataset.
"""

from __future__ import annotations

from stretto.base.errors import ConfigError
from stretto.envs.base import Message, SingleTurnEnv
from stretto.envs.bundled.held_out import SolvedTasks, user
from stretto.envs.rewards.math_reward import MathVerifier
from stretto.records.rollout import Task


class Arithmetic(SolvedTasks, SingleTurnEnv):
    """num_terms numbers of 0..max_number, each added or subtracted (`operators`); results may be negative."""

    stream = "arithmetic"

    def __init__(
        self,
        max_number: int = 20,
        num_terms: int = 2,
        operators: str = "+-",
        seed: int = 0,
        instruction: str = "",
        timeout_s: float = 3.0,
    ) -> None:
        if not 1 <= max_number <= 10**6 or not 2 <= num_terms <= 16:
            raise ConfigError(
                f"arithmetic: max_number = {max_number}, num_terms = {num_terms} must satisfy "
                "1 <= max_number <= 1000000 and 2 <= num_terms <= 16."
            )
        if (max_number + 1) ** num_terms * len(operators) ** (num_terms - 1) < 64:
            raise ConfigError(
                "arithmetic: these settings make fewer than 64 different tasks; raise max_number or num_terms."
            )
        if not operators or set(operators) - set("+-*"):
            raise ConfigError(f"arithmetic: operators = {operators!r} may hold +, - and * only.")
        self.name = "arithmetic"
        self.max_number = max_number
        self.num_terms = num_terms
        self.operators = operators
        self.seed = seed
        self.instruction = instruction
        self.verifier = MathVerifier(timeout_s=timeout_s)

    def make_text(self, entropy: int) -> str:
        entropy, first = divmod(entropy, self.max_number + 1)
        terms = str(first)
        for _ in range(self.num_terms - 1):
            entropy, number = divmod(entropy, self.max_number + 1)
            entropy, operator = divmod(entropy, len(self.operators))
            terms += f"{self.operators[operator]}{number}"
        return terms

    def task_data(self, text: str) -> dict[str, str]:
        # The text has digits and operators only, so eval is safe.
        return {"question": f"{text}=", "answer": str(eval(text, {"__builtins__": {}}))}

    def prompt(self, task: Task) -> list[Message]:
        return [user(self.instruction + task.data["question"])]

    async def score(self, task: Task, text: str) -> float:
        return float(await self.verifier.verify(text, task.data["answer"]))

    def demonstration(self, task: Task) -> str:
        """The answer, which `opsd` shows to the teacher."""
        return f"\\boxed{{{task.data['answer']}}}"
