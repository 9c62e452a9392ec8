"""`stretto init DIR`: writes a small project that runs unchanged, as a start for the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.config.reading.plain import PlainParser

ENVIRONMENT = '''\
"""The task of this project. What else an environment can do: docs/environments.md of stretto."""

import random

from stretto.envs.base import SingleTurnEnv, TaskSource
from stretto.records.rollout import Task


class Vowels(SingleTurnEnv):
    """Answer with vowels, whatever is asked."""

    name = "vowels"

    def tasks(self, split):
        """Tasks by their index; those of "eval" are never trained on."""

        def make(index):
            letters = random.Random(f"{split}-{index}").sample("abcdefghij", 6)
            return Task(env=self.name, task_id=f"{split}-{index}", data={"letters": "".join(letters)})

        return TaskSource(make)

    def prompt(self, task):
        """The prompt of a task: a text, or a list of messages."""
        return task.data["letters"]

    def score(self, task, text):
        """The reward of a reply, a number."""
        return sum(letter in "aeiou" for letter in text) / max(len(text), 6)
'''

SFT = """\
# A tiny model, made from scratch and warmed up on solved tasks: `sft @ sft.toml`.
# If you have a model of your own, you do not need this file: name the model in rl.toml.

max_steps = 60
seq_len = 2048
batch_size = 64

[run]
name = "warm-up"

[model.scratch]

[data]
type = "environment"
id = "sort-letters"
num_rows = 4096

[optim]
lr = 2e-3
"""

RL = """\
# Reinforcement learning on the environment of envs.py: `rl @ rl.toml`. Every key: `rl --help all`.

max_steps = 60
seq_len = 1024              # tokens in a packed row of the trainer

[run]
name = "vowels"             # files are in outputs/vowels

[model]
name = "{output_dir}/warm-up/weights/latest"

[orchestrator]
batch_size = 128            # rollouts in a step ...
group_size = 8              # ... of which 8 each are of one task and are compared

[orchestrator.train.sampling]
max_completion_tokens = 8

[[orchestrator.env]]
id = "envs:Vowels"          # the class Vowels in envs.py

[orchestrator.eval]
interval = 30               # steps between evaluations on tasks of the split "eval"
num_examples = 64

[trainer.optim]
lr = 3e-4                   # it rises over the first ten steps
"""

README = """\
# {name}

```bash
sft @ sft.toml              # a tiny model to start from
rl @ rl.toml --dry-run      # what would run, and the first task as the model will see it
rl @ rl.toml                # train; less than a minute on a laptop
stretto rollouts outputs/vowels # what the model says
stretto plot outputs/vowels # reward, length, entropy and mismatch: plot.png
```

`envs.py` has the task, `rl.toml` the configuration. Change them; `rl @ rl.toml --clean` starts over.
"""

FILES = {"envs.py": ENVIRONMENT, "sft.toml": SFT, "rl.toml": RL, "README.md": README}


def init(words: Sequence[str]) -> int:
    """Write the project into an empty or new directory.

    Raises: ConfigError for a directory that has other files.
    """
    parser = PlainParser("init", "Write a small project that runs unchanged: environment, configuration, README.")
    parser.add_argument("directory", help="where to write it; made if it does not exist")
    name = parser.parse_args(list(words)).directory
    directory = Path(name)
    try:
        place = directory.resolve()  # `new/..` is the directory itself
        if not name or (place.exists() and (not place.is_dir() or any(place.iterdir()))):
            what = "is a file" if Path(name).is_file() else "is there and not empty"
            raise ConfigError(f"stretto init: {name!r} {what}; name a new directory.")
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            (directory / name).write_text(text.replace("{name}", directory.resolve().name))
    except OSError as error:
        raise ConfigError(
            f"stretto init: cannot write {directory}: {error.strerror}; name another directory."
        ) from error
    print(f"wrote {', '.join(FILES)} into {directory}\n\nnext:\n  cd {directory}\n  sft @ sft.toml\n  rl @ rl.toml")
    return 0
