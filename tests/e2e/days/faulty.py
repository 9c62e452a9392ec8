"""Rewards of somebody in a hurry, for four letters that are to be put in order."""

from itertools import pairwise

from stretto.envs.bundled.sort_letters import SortLetters


class Constant(SortLetters):
    """A score that forgets the reply."""

    def __init__(self) -> None:
        super().__init__(num_letters=4)
        self.name = "constant"

    def score(self, task, text):
        return 1.0


class Ordered(SortLetters):
    """A score for letters that rise, whatever the letters of the task are: half of what was meant."""

    def __init__(self) -> None:
        super().__init__(num_letters=4)
        self.name = "ordered"

    def score(self, task, text):
        text = text.strip()
        return sum(a <= b for a, b in pairwise(text)) / 3 if len(text) == 4 else 0.0
