"""count-shapes: a picture of a few shapes, and how many there are. Reward 1 for the right number, else 0.

The environment draws its own pictures: circles, squares and triangles of several colours, none over another, at places
that depend on the task alone. It is the smallest task that nothing but the picture answers.
"""

from __future__ import annotations

import io
import math

import numpy as np

from stretto.base.errors import ConfigError
from stretto.data.pictures import data_url
from stretto.envs.base import Message, SingleTurnEnv
from stretto.envs.bundled.held_out import SolvedTasks
from stretto.records.rollout import Task

KINDS = ("circle", "square", "triangle")
COLORS = ("red", "green", "blue", "orange", "purple", "black")


class CountShapes(SolvedTasks, SingleTurnEnv):
    """1 to max_shapes shapes on a white picture of size x size pixels."""

    stream = "count-shapes"

    def __init__(self, max_shapes: int = 4, size: int = 32, question: str = "how many?", seed: int = 0) -> None:
        if not 2 <= max_shapes <= 9:
            raise ConfigError(f"count-shapes: max_shapes = {max_shapes} must be 2 to 9.")
        smallest = 12 * math.ceil(math.sqrt(max_shapes))
        if not smallest <= size <= 1024:
            raise ConfigError(f"count-shapes: size = {size} pixels must be {smallest} to 1024 for {max_shapes} shapes.")
        self.name = "count-shapes"
        self.max_shapes, self.size, self.question, self.seed = max_shapes, size, question, seed

    def make_text(self, entropy: int) -> str:
        places, num = divmod(entropy, self.max_shapes)
        return f"{num + 1} {places % 2**31}"

    def task_data(self, text: str) -> dict[str, int]:
        num_shapes, places = map(int, text.split())
        return {"num_shapes": num_shapes, "places": places}

    def prompt(self, task: Task) -> list[Message]:
        encoded = draw_shapes(task.data["num_shapes"], task.data["places"], self.max_shapes, self.size)
        shown = {"type": "image", "image": data_url(encoded)}
        return [{"role": "user", "content": [shown, {"type": "text", "text": self.question}]}]

    def score(self, task: Task, text: str) -> float:
        return float(text.strip() == self.demonstration(task))

    def demonstration(self, task: Task) -> str:
        """The answer, which `opsd` shows to the teacher."""
        return str(task.data["num_shapes"])


def draw_shapes(num_shapes: int, places: int, max_shapes: int, size: int) -> bytes:
    """A picture of num_shapes shapes as PNG; `places` is the seed of where they are and what they look like."""
    from PIL import Image, ImageDraw

    random = np.random.default_rng([num_shapes, places])
    per_side = math.ceil(math.sqrt(max_shapes))
    cell = size / per_side
    picture = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(picture)
    for at in random.permutation(per_side**2)[:num_shapes].tolist():
        radius = cell * random.uniform(0.28, 0.38)
        slack = cell / 2 - radius - 1  # a pixel between neighbours
        x = (at % per_side + 0.5) * cell + random.uniform(-slack, slack)
        y = (at // per_side + 0.5) * cell + random.uniform(-slack, slack)
        color, kind = COLORS[random.integers(len(COLORS))], KINDS[random.integers(len(KINDS))]
        box = (x - radius, y - radius, x + radius, y + radius)
        if kind == "circle":
            pen.ellipse(box, fill=color)
        elif kind == "square":
            pen.rectangle(box, fill=color)
        else:
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=color)
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()
