"""echo: which messages of an environment are learned by cross-entropy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases.config import ENV, complaints
from fakes import CharRenderer, FakeEngine, FakeTrainer, GuessEnv, parrot, run_virtual
from orchestrator_runs import ECHO, config, train

from stretto.base.errors import ConfigError
from stretto.config.sections.algorithm import EchoAlgo
from stretto.config.sections.model import RendererSection
from stretto.config.sections.orchestrator import SamplingSection
from stretto.orchestrator.rollout.play import Draw, build_echo
from stretto.orchestrator.rollout.player import Player


def where(text, weights):
    """The characters of non-zero weight."""
    return "".join(c for c, w in zip(text, weights) if w)


def played(env, algo, **settings):
    engine = FakeEngine(parrot(1.0))
    player = Player(
        engine=engine, renderer=CharRenderer(), sampling=SamplingSection(), seq_len=300,
        echo=build_echo(algo, env), **settings,
    )  # fmt: skip
    group = run_virtual(player.play(env, Draw(0, env.tasks("train").task(0), 1, version=0)))
    return group.rollouts[0].branches


def text(branch):
    return "".join(map(chr, branch.token_ids))


def test_what_was_asked_first_and_what_was_replied_are_not_echoed():
    (branch,) = played(GuessEnv(num_turns=3), EchoAlgo(user=0.25))
    assert where(text(branch), branch.ce_weights) == "w01w02"
    assert set(branch.ce_weights) == {0.0, 0.25} and not branch.ce_weights[branch.is_sampled].any()


def test_where_history_is_rewritten_every_message_is_echoed_once():
    branches = played(GuessEnv(num_turns=4, rewrite_history=True), EchoAlgo(user=1.0))
    assert len(branches) == 4
    echoed = [where(text(b), np.zeros(len(b.token_ids)) if b.ce_weights is None else b.ce_weights) for b in branches]
    assert echoed == ["", "w01", "w02", "w03"]


def test_a_filter_of_the_users_own_says_which_messages_are_echoed():
    (branch,) = played(GuessEnv(num_turns=3), EchoAlgo(user=1.0, filter="echo_filters:ends_with_two"))
    assert where(text(branch), branch.ce_weights) == "w02"


def test_without_a_role_that_speaks_nothing_is_echoed():
    (branch,) = played(GuessEnv(num_turns=3), EchoAlgo())
    assert branch.ce_weights is None


def test_an_environment_that_answers_in_no_weighted_role_is_reported_once(caplog):
    guess, place = GuessEnv(), "orchestrator.env.2.algo"
    for algo, num_warnings in ((EchoAlgo(), 1), (EchoAlgo(user=0.1), 0)):
        caplog.clear()
        echo = build_echo(algo, guess, place)
        for _ in range(200):
            echo.weight_of({"role": "user", "content": "again"})
        assert len(caplog.messages) == num_warnings
        if num_warnings:
            expected = f"{place}: guess has answered 64 times, always as user, and only tool has a weight: "
            assert caplog.messages[0] == expected + "no answer is learned"


def test_an_environment_of_one_turn_has_nothing_to_echo(tmp_path):
    cfg = config(tmp_path, env=[{"id": ECHO, "name": "echo", "algo": {"type": "echo"}}])
    with pytest.raises(ConfigError, match=r"^orchestrator\.env\.0\.algo\.type.*echo has one turn"):
        train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=3))


def test_a_real_renderer_knows_the_text_of_messages(tmp_path):
    from stretto.chat.render import build_renderer
    from stretto.chat.tokenizer import build_letters_tokenizer, load_tokenizer

    tokenizer = load_tokenizer(build_letters_tokenizer(tmp_path))
    renderer = build_renderer(tokenizer, RendererSection(name="qwen3"))
    first = [{"role": "user", "content": "abc"}]
    prompt = renderer.render_prompt(first)
    owners = renderer.text_owners(first)
    assert renderer.decode(prompt[owners == 0]) == "abc" and (owners >= -1).all() and len(owners) == len(prompt)
    reply = np.array([*tokenizer.encode("cba"), renderer.stop_ids[0]], np.int32)
    more = [{"role": "user", "content": "def"}, {"role": "user", "content": "gh"}]
    history = [*first, renderer.parse(reply, prompt)]
    extended = renderer.extend(prompt, reply, history, more)
    owners = renderer.text_owners(more, after=(prompt, reply, history))
    assert len(owners) == len(extended)
    assert [renderer.decode(extended[owners == i]) for i in (0, 1)] == ["def", "gh"]
    assert (owners[: len(prompt) + len(reply)] == -1).all()
    leading = renderer.render_leading([{"role": "system", "content": "hi"}])
    assert renderer.decode(leading).startswith("<|im_start|>system") and "assistant" not in renderer.decode(leading)


WRONG = {
    "echo of nobody": (
        ENV + 'algo = { type = "echo", tool = "None" }\n',
        ["no role has a weight, so that it would be grpo"],
    ),
    "masking what is never continued": (
        "[orchestrator]\npartial_rollout = false\nmask_offpolicy_in_partial_rollout = true\n" + ENV,
        ["orchestrator.mask_offpolicy_in_partial_rollout = true does nothing"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_one_mistake_is_one_message(mistake: str, tmp_path: Path) -> None:
    toml, parts = WRONG[mistake]
    (line,) = complaints(tmp_path, toml, "")
    for part in parts:
        assert part in line, line
