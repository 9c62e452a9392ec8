"""A package of a user that registers something wrongly: one message names the entry point and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto import addons
from stretto.base.errors import ConfigError

RUN = ["rl", "@", "examples/reverse_text/rl.toml", "--print-config"]
MODULES = {
    "__init__.py": "",
    "raising.py": "raise RuntimeError('boom')\n",
    "needy.py": "import nowhere_to_find\n",
    "cut.py": "def (\n",
    "three.py": "FAMILY = 3\n",
    "again.py": "from stretto.families.own.dense import QWEN3 as FAMILY\n",
    "alias.py": (
        "from stretto.families.family import Family\nfrom stretto.families.traits import Traits\n"
        "FAMILY = Family(name='mine', architecture='X', traits=Traits(aliases={'qwen3': None}))\n"
    ),
    "verb.py": "run = lambda words: print('ran', *words) or 0\n",
}


def register(folder: Path, text: str, distribution: str = "stretto_mine") -> None:
    """What pip writes of a distribution's entry points."""
    made = folder / f"{distribution}-1.0.dist-info"
    made.mkdir()
    (made / "entry_points.txt").write_text(text)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    return tmp_path


def told(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{site}"}
    command = [sys.executable, "-m", "stretto", *words]
    return subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("entry", "words", "said"),
    [
        ("families]\nmine=mine.raising:FAMILY", RUN, "mine/raising.py:1: RuntimeError: boom"),
        ("families]\nmine=mine.needy:FAMILY", RUN, "mine/needy.py:1: ModuleNotFoundError: No module named 'nowhere_to"),
        ("families]\nmine=mine.cut:FAMILY", RUN, "mine/cut.py:1: SyntaxError"),
        ("families]\nmine=mine.absent:FAMILY", RUN, "No module named 'mine.absent'"),
        ("families]\nmine=mine.three:FAMLY", RUN, "mine.three has no FAMLY"),
        ("families]\nmine=mine.three:FAMILY", RUN, "it is 3, which is no Family of stretto"),
        ("families]\nmine=mine.again:FAMILY", RUN, "it is 'qwen3', which another family is"),
        ("families]\nmine=mine.alias:FAMILY", RUN, "it is 'qwen3', which another family is"),
        ("spellings]\nmine=mine.three:FAMILY", RUN, "it is 3, which is no Spelling of stretto"),
        ("rules]\nModelSection=mine.three", RUN, "it has no RULES, a table of rules by class of section"),
        ("verbs]\nmine=mine.raising:run", ["mine"], "mine/raising.py:1: RuntimeError: boom"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_named(entry: str, words: list[str], said: str, site: Path) -> None:
    register(site, f"[stretto.{entry}\n")
    done = told(site, *words)
    name, value = entry.partition("\n")[2].split("=")
    begin = f"error: entry point {name} of stretto.{entry.partition(']')[0]}, `{value}`: "
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(begin), done.stderr
    assert said in done.stderr and done.stderr.endswith("; mend that, or uninstall the package mine\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.heavy
def test_help_lists_a_verb_whose_package_says_nothing_of_it(site: Path) -> None:
    register(site, "[stretto.verbs]\nmine=mine.verb:run\n")
    assert "\n  mine          of the package mine\n" in told(site, "--help").stdout
    assert told(site, "mine", "a", "b").stdout == "ran a b\n"


def test_two_packages_cannot_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "[stretto.families]\nphi3=mine:PHI3\n")
    register(tmp_path, "[stretto.families]\nphi3=yours:PHI3\nphi4=yours:PHI4\n", "stretto_yours")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    said = (
        "entry point phi3 of stretto.families is `mine:PHI3` of the package stretto_mine, and `yours:PHI3` of stretto_y"
    )
    with pytest.raises(ConfigError, match=said):
        addons._found.__wrapped__()


def test_of_two_installations_of_one_package_the_first_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As importlib has it; the tree's own entry points stand before those that pip wrote of an older one."""
    for name, text in (("a", "phi3=mine:NEW\n"), ("b", "phi3=mine:OLD\ngone=mine:GONE\n")):
        (tmp_path / name).mkdir()
        register(tmp_path / name, f"[stretto.families]\n{text}")
    register(tmp_path / "b", "[stretto.families]\nafmoe=stretto_old:AFMOE\nolder=stretto_old:X\n", "stretto")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "a"), str(tmp_path / "b")])
    found = addons._found.__wrapped__()["stretto.families"]
    assert found == {**addons.registered("stretto.families"), "phi3": "mine:NEW"}
