"""What three people have at their desks: files that they wrote by the documents, and a terminal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from runs import start, wait

HERE = Path(__file__).parent


def typed(folder: Path, *words: str) -> str:
    """What a command prints, typed in a folder; it must succeed."""
    code, output = wait(start(words[0], list(words[1:]), folder))
    assert code == 0, output
    return output


def copied(folder: Path, *names: str) -> Path:
    """The folder, with these files of a person in it."""
    for name in names:
        shutil.copy(HERE / name, folder)
    return folder


def summary(folder: Path, run: str) -> dict[str, Any]:
    return json.loads((folder / "outputs" / run / "summary.json").read_text())
