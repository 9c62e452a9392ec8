"""An environment of verifiers v0."""

import verifiers as vf


def load_environment(num_examples: int = 10) -> "vf.Environment":
    return vf.SingleTurnEnv(dataset=None, rubric=vf.Rubric())
