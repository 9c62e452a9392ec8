"""sort-letters as distillation.py needs it: solved rows some of which show the answer first, as `opsd` will."""

from __future__ import annotations

from stretto.envs.bundled.sort_letters import SortLetters


class ShownLetters(SortLetters):
    """Tells the answer in a system message, in `shown` of ten solved rows, so that a model learns to copy it."""

    def __init__(self, num_letters: int = 4, shown: int = 8) -> None:
        super().__init__(num_letters=num_letters)
        self.shown = shown

    def sft_rows(self, num_rows: int, seed: int) -> list[dict]:
        rows = super().sft_rows(num_rows, seed)
        for index, row in enumerate(rows):
            if index % 10 < self.shown:
                hint = {"role": "system", "content": row["messages"][-1]["content"]}
                row["messages"].insert(0, hint)
        return rows
