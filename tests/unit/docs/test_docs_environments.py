"""docs/environments.md holds: every environment in it plays, and its list of families is the tested one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases.renderers import FAMILIES
from fakes import CharRenderer, FakeEngine

from stretto.config.sections.orchestrator import SamplingSection
from stretto.envs.base import load_environment
from stretto.orchestrator.rollout.play import Draw
from stretto.orchestrator.rollout.player import Player
from stretto.records.rollout import RolloutStatus

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "environments.md").read_text()
ALL_BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
BLOCKS = [block for block in ALL_BLOCKS if re.search(r"^class ", block, re.M)]
NAMES = [re.findall(r"^class (\w+)", block, re.M)[0] for block in BLOCKS]

SAYS = {
    "Shout": (lambda prompt: prompt.removeprefix("U").removesuffix(".A").upper(), 1),
    "Guess": (lambda prompt: str(prompt.count("A") - 1), 1),
    "Climb": (lambda prompt: "9" if "A5." in prompt else "5", 1),
    "Capitals": (lambda prompt: "Paris" if "France" in prompt else "Tokyo", 1),
    "TwoCities": (lambda prompt: "10" if "Lima" in prompt else "37", 1),
    "Doubled": (lambda prompt: prompt.removeprefix("U").removesuffix(".A") * 2, 1),
    "Auction": (lambda prompt: "7" if "umpire" not in prompt else "first", 2),
    "Office": (lambda prompt: "1" if "How many" in prompt else f"\\boxed{{{eval(prompt.strip('U.A='))}}}", 2),
}


@pytest.mark.parametrize(("name", "code"), list(zip(NAMES, BLOCKS)), ids=NAMES)
def test_every_environment_shown_plays(name, code, tmp_path, monkeypatch):
    module = f"shown_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    env = load_environment(f"{module}:{name}")
    says, num_trained = SAYS[name]
    engine = FakeEngine(lambda prompt, rng, version: says(prompt))
    player = Player(engine, CharRenderer(), SamplingSection(), seq_len=1000, max_retries=0)
    group = asyncio.run(player.play(env, Draw(0, env.tasks("train").task(1), 2, version=0)))
    assert all(r.status is RolloutStatus.FINISHED for r in group.rollouts), group.rollouts[0].error
    assert [r.reward for r in group.rollouts] == [0.0 if name == "Auction" else 1.0] * 2
    trained = [b for r in group.rollouts for b in r.branches if b.is_trained]
    assert len(trained) == 2 * num_trained
    held_out = [env.tasks("eval").task(i).data for i in range(2)]
    assert name == "Auction" or not any(env.tasks("train").task(i).data in held_out for i in range(2))


async def test_the_episode_of_searches_goes_on_after_a_stop():
    [block] = [block for block in ALL_BLOCKS if "def search_episode" in block]
    names: dict = {}
    exec(block, names)
    encode = CharRenderer().encode
    replies = ["<search>Rome</search>", "<answer>5</answer>"]

    prompts = []

    class Ctx:
        async def generate(self, tokens, stop):
            prompts.append("".join(map(chr, tokens)))
            text = replies.pop(0)
            return SimpleNamespace(
                text=text, token_ids=encode(text), stop_reason=next(each for each in stop if text.endswith(each))
            )

    answer = await names["search_episode"](Ctx(), encode("q:"), {"Rome": "old"}.get, encode)
    assert answer == "<answer>5</answer>"
    assert prompts == ["q:", "q:<search>Rome</search><information>old</information>"]


def test_all_kinds_are_shown_and_the_families_are_those_of_the_test():
    assert list(SAYS) == NAMES
    listed = " ".join(PAGE.split("templates: ")[1].split(". It is not")[0].split())
    assert listed.replace(" (text)", "").replace(" and ", ", ").split(", ") == FAMILIES
