"""The folder in which blocks of the documents are run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pages.workplace import DEMO_STEPS, build_workplace
from runs import start, wait

SMALLER = ["--max-steps", str(DEMO_STEPS), "--orchestrator.batch-size", "32", "--no-orchestrator.eval"]
LIKE_MODEL = ("teacher", "sft", "my-run", "maths", "code")
LIKE_RUN = ("demo", "other", "RUN", "Vowels-sort-letters-sft", "slow", "rloo")


@pytest.fixture(scope="session")
def demo(once: Callable[[str, Callable[[], Path]], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo has run; model and run are there under the names that pages use."""
    return once("demo", lambda: with_demo(tmp_path_factory.mktemp("documents")))


def with_demo(directory: Path) -> Path:
    folder = build_workplace(directory, models=())
    for verb, words in (("sft", []), ("rl", SMALLER)):
        code, output = wait(start(verb, ["@", f"examples/sort_letters/{verb}.toml", *words], folder))
        assert code == 0, output
    outputs = folder / "outputs"
    for name in LIKE_MODEL:
        weights = outputs / "sort-letters-sft" / "weights" / "latest"
        shutil.copytree(weights.resolve(), outputs / name / "weights" / "latest")
    for name in LIKE_RUN:
        shutil.copytree(outputs / "sort-letters", outputs / name, symlinks=True)
    return folder


@pytest.fixture
def workplace(demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo, tmp_path / "workplace", symlinks=True))
