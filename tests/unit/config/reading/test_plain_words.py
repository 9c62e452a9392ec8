"""Wrong words of the verbs that argparse reads: one message says the word, what is wanted, and what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes.add_ons import skip_without_verb

from stretto import addons
from stretto.cli import main
from stretto.config.reading.plain import parser_of
from stretto.verbs import PLAIN_VERBS

OF_RUNS = ("show", "rollouts", "plot", "push", "status", "logs", "stop", "stacks")
VERBS = ("runs", "show", "rollouts", "plot", "view", "push", "init", "plan", "doctor", "status", "logs", "stop")


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says, which ends with 2."""
    skip_without_verb(words[0])
    assert main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1, text
    assert not re.search(r"Errno|Traceback|usage:|unrecognized|This is a bug", text), text
    return text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with runs in outputs."""
    monkeypatch.chdir(tmp_path)
    for name in ("vowels", "letters"):
        configs = tmp_path / "outputs" / name / "configs"
        configs.mkdir(parents=True)
        (configs / "run.json").write_text(json.dumps({"max_steps": 3}))
    (tmp_path / "rl.toml").write_text("max_steps = 3\n")
    (tmp_path / "hollow").mkdir()
    return tmp_path


@pytest.mark.parametrize("verb", [*VERBS, "stacks"])
def test_an_unknown_flag_is_named_with_what_there_is(verb, here, capsys) -> None:
    text = told([verb, "--zzzz"] if verb not in ("plan", "doctor") else [verb, "--jsn"], capsys)
    assert re.search("unknown flag; (did you mean --json|there are .*--help)", text)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["runs", "--jsonn"], "--json"),
        (["rollouts", "outputs/vowels", "--min_reward", "1"], "--min-reward"),
        (["rollouts", "outputs/vowels", "--Worst=3"], "--worst"),
        (["logs", "outputs/vowels", "--folow"], "--follow"),
        (["view", "--prot", "1"], "--port"),
        (["plan", "rl.toml", "--simulated-step", "3"], "--simulated-steps"),
        (["push", "outputs/vowels", "--repo_id", "a/b"], "--repo-id"),
    ],
)
def test_a_misspelled_flag_is_told_the_one_that_was_meant(words, meant, here, capsys) -> None:
    assert f"did you mean {meant}?" in told(words, capsys)


@pytest.mark.parametrize("verb", OF_RUNS)
def test_a_verb_without_its_run_says_which_runs_there_are(verb, here, capsys) -> None:
    text = told([verb], capsys)
    assert "a word is missing: run" in text and "outputs/letters" in text and "outputs/vowels" in text


@pytest.mark.parametrize("verb", [*OF_RUNS, "runs", "view"])
@pytest.mark.parametrize(
    ("place", "needed"),
    [
        ("outputs/vowel", "did you mean outputs/vowels?"),
        ("vowels", "outputs/vowels"),
        ("nowhere/else", "outputs/vowels"),
        ("hollow", "outputs/vowels"),
        ("rl.toml", "this is a file; a run is a directory"),
    ],
)
def test_a_place_without_a_run_is_told_the_runs_there_are(verb, place, needed, here, capsys) -> None:
    text = told([verb, place], capsys)
    assert place in text and needed in text


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["rollouts", "outputs/vowels", "--step", "last"], "--step: 'last' is not a whole number"),
        (["rollouts", "outputs/vowels", "--min-reward", "high"], "--min-reward: 'high' is not a number"),
        (["rollouts", "outputs/vowels", "--env"], "--env: a value must follow it"),
        (["logs", "outputs/vowels", "-n", "ten"], "-n, --lines: 'ten' is not a whole number"),
        (["export", "outputs/vowels", "--kind", "bst"], "none of its values; did you mean best? `stretto"),
        (["show", "outputs/vowels", "--json=1"], "--json: it takes no value"),
        (["show", "outputs/vowels", "outputs/letters"], "outputs/letters: one word too many; it takes run"),
        (["plan", "rl.toml", "--steps", "many"], "--steps: many: give at least 1, a whole number"),
        (["doctor", "--wait", "soon"], "--wait: 'soon' is not a number"),
        (["view", "outputs", "--port", "99999"], "a port is a number from 0 to 65535"),
        (["view", "outputs", "--host", "203.0.113.7"], "that is no address of this machine"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_wanted(words, needed, here, capsys) -> None:
    assert needed in told(words, capsys)


@pytest.mark.parametrize("verb", [*VERBS, "stacks", "chat", "convert"])
def test_help_says_what_each_flag_does_and_its_default(verb) -> None:
    skip_without_verb(verb)
    paths = {**PLAIN_VERBS} | addons.offers("stretto.verbs")
    parser = parser_of(addons.object_at(paths[verb]))
    assert parser is not None and parser.description
    for action in parser._actions:
        assert action.help, action.option_strings
        default = action.default
        if not isinstance(default, bool) and default not in (None, [], "==SUPPRESS=="):
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert shown in action.help, action.option_strings
