"""Runs that do not learn: what they print, `stretto show`, the page's address and the documents name the cause."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from desk import HERE, copied, typed
from letters import rows

from stretto_view.page import now
from stretto_view.page.library import OpenRun

pytestmark = pytest.mark.slow
PAGE = (HERE.parents[2] / "docs" / "reward_does_not_rise.md").read_text()
LETTERS = '{"id": "sort-letters", "args": {"num_letters": 4}}'


@pytest.fixture
def folder(sorter: Path, tmp_path: Path) -> Path:
    (tmp_path / "warmed-up").symlink_to(sorter)
    return copied(tmp_path, "faulty.py", "faulty_rl.toml")


def trained(folder: Path, env: str, *words: str, steps: int = 10) -> str:
    """What a run of this environment prints."""
    settings = ["--orchestrator.env", f"[{env}]", "--max-steps", str(steps)]
    return typed(folder, "rl", "@", "faulty_rl.toml", *settings, *words)


def told(folder: Path, printed: str, *texts: str) -> None:
    """All texts are on the console, and later in `stretto show` and on the page, which quotes the verdict too."""
    shown = typed(folder, "show", "outputs/run")
    found = json.dumps(now.now(OpenRun(folder / "outputs" / "run")), ensure_ascii=False, default=str)
    for text in texts:
        for place, said in (("the console", printed), ("show", shown), ("the page", found)):
            assert text in said, (place, text, said)


def documented(words: str) -> str:
    """The paragraph of the page that begins with these words."""
    return " ".join(re.search(rf"^- \*\*{words}.*?(?=\n- |\n\n)", PAGE, re.S | re.M)[0].split())


def test_a_reward_that_is_always_the_same(folder: Path) -> None:
    printed = trained(folder, '{"id": "faulty:Constant"}')
    told(folder, printed, "likely: every rollout has the reward 1", "does the score not look at the reply?")
    assert "at whether the score uses the reply" in documented("groups have equal")


def test_labels_of_other_rows(folder: Path) -> None:
    words = rows(0, 400)
    labels = [row["answer"] for row in words[1:] + words[:1]]
    lines = [json.dumps({"prompt": row["prompt"], "label": label}) for row, label in zip(words, labels)]
    (folder / "wrong.jsonl").write_text("\n".join(lines))
    env = '{"id": "dataset", "args": {"path": "wrong.jsonl", "reward": "exact"}}'
    first = typed(folder, "rl", "@", "faulty_rl.toml", "--orchestrator.env", f"[{env}]", "--dry-run")
    label, word = re.search(r"with the label '(\w+)'.*?\| (\w+)<\|im_end", first, re.S).groups()
    assert sorted(word) != sorted(label)  # a person sees it before anything is trained
    printed = trained(folder, env)
    told(folder, printed, "of the groups have equal rewards", "as with the wrong label (`--dry-run` shows one")
    assert "look at the label" in documented("groups have equal")
    read = typed(folder, "rollouts", "outputs/run", "--worst", "1")
    asked, wanted = re.search(r"user: (\w+)", read)[1], re.search(r"label: (\w+)", read)[1]
    assert sorted(asked) != sorted(wanted)


def test_a_reward_that_pays_for_something_else(folder: Path) -> None:
    evals = f'{{"interval": 30, "num_examples": 128, "env": [{LETTERS}]}}'
    printed = trained(folder, '{"id": "faulty:Ordered"}', "--orchestrator.eval", evals, steps=60)
    told(folder, printed, "improved, but held-out rewards have fallen (sort-letters ", "pay for something else")
    assert "evaluate what you mean" in documented("held-out rewards have fallen")
    read = typed(folder, "rollouts", "outputs/run", "--best", "8")
    pairs = re.findall(r"user: (\w+).*?</think>\s+(\w+)", read, re.S)
    assert len(pairs) == 8 and all(sorted(asked) != sorted(said) for asked, said in pairs), read


def test_a_learning_rate_that_is_too_high(folder: Path) -> None:
    printed = trained(folder, LETTERS, "--trainer.optim.lr", "0.05", steps=20)
    told(folder, printed, "likely: the policy moved too far in step", "Lower trainer.optim.lr, or raise")
    assert "lower `trainer.optim.lr`" in documented("the policy moved too far")
