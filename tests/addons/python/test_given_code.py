"""Classes and functions of a script, as a file that another process imports."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.base.errors import ConfigError
from stretto.base.foreign import load_object
from stretto_python.given.files import Given, placed
from stretto_python.given.pickled import opened

SCRIPT = '''
import functools
import json as js
import re
from dataclasses import dataclass
from pathlib import Path

WORDS = ["a", "b"]
DIGITS = re.compile(r"\\d+")
HOME = Path("somewhere")

def double(value):
    return 2 * value

@dataclass
class Point:
    x: int
    def moved(self):
        return Point(self.x + 1)

@functools.cache
def cached(n):
    return n

class Base:
    factor = 3
    def times(self, x):
        return double(x) * self.factor

class Mine(Base):
    """Uses what the script defines."""
    unused = None
    def __init__(self, offset=1):
        self.offset = offset
    def score(self, text):
        local = js.loads(text)
        return [self.times(local), self.offset, WORDS, DIGITS.findall("a12"), Point(1).moved().x, str(HOME)]
    @staticmethod
    def tasks(split):
        return split
    def rollout(self):
        return super().times(1)

def made(n):
    def inner(x):
        return x + n
    return inner

class Odd:
    def __init__(self, n):
        self.n, self.f = n, lambda x: x * n

def stateful():
    return run_of_the_script, 1

run_of_the_script = None
'''


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """What the script defines, as its own process has it."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return runpy.run_path(str(file), run_name="__main__")


def written(given: Given, directory: Path, text: str) -> Any:
    given.write(directory, {})
    return load_object(placed(text, str(directory)), "it")


def test_a_class_is_written_with_all_that_it_uses(script: dict[str, Any], tmp_path: Path) -> None:
    given = Given()
    found = written(given, tmp_path / "run", given.named(script["Mine"], "env", "Mine"))
    assert found().score("5") == [30, 1, ["a", "b"], ["12"], 2, "somewhere"] and found().rollout() == 6
    code = (tmp_path / "run" / "code.py").read_text()
    assert "pickle" not in code and "unused = None" in code and "def made" not in code and "import json as js" in code
    assert not list((tmp_path / "run").glob("*.pickle"))


def test_closures_lambdas_and_instances_are_pickled(script: dict[str, Any], tmp_path: Path) -> None:
    given = Given()
    names = [
        given.named(script["made"](4), "reward", "inner"),
        given.named(script["Odd"](5).f, "reward", "function"),
        given.named(script["cached"], "reward", "cached"),
        given.named(script["made"](7), "reward", "inner"),
    ]
    four, five, _, seven = [written(given, tmp_path / "run", name) for name in names]
    assert (four(1), five(2), seven(1)) == (5, 10, 8)
    pickles = sorted((tmp_path / "run").glob("*.pickle"))
    assert len(pickles) >= 3 and all(file.stat().st_mode & 0o77 == 0 for file in pickles)


def test_an_instance_is_made_anew_by_every_process(script: dict[str, Any], tmp_path: Path) -> None:
    given = Given()
    entry = given.environment({"id": script["Mine"](offset=9)}, ("orchestrator", "env", 0))
    make = written(given, tmp_path / "run", entry["id"])
    assert entry["name"] == "mine" and make().score("1")[1] == 9 and make() is not make()


def test_arguments_that_no_configuration_holds_go_with_the_class(script: dict[str, Any], tmp_path: Path) -> None:
    given = Given()
    entry = given.environment({"id": script["Odd"], "args": {"n": script["double"], "m": 3}}, ("env", 0))
    partial = written(given, tmp_path / "run", entry["id"])
    assert entry["args"] == {"m": 3} and partial.keywords["n"](4) == 8 and partial.func.__name__ == "Odd"


def test_a_function_whose_file_was_edited_is_not_written_as_it_is_now(script: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("2 * value", "3 * value"))
    given = Given()
    assert written(given, tmp_path / "run", given.named(script["double"], "reward", "double"))(2) == 4


def test_two_objects_of_one_name_stay_two(script: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("WORDS = 3\ndef double(value):\n    return WORDS * value\n")
    other = runpy.run_path(str(tmp_path / "other.py"), run_name="__main__")
    given = Given()
    names = [given.named(each["double"], "reward", "double") for each in (script, other, script)]
    mine = given.named(script["Mine"], "env", "Mine")
    two, three, again = [written(given, tmp_path / "run", name) for name in names]
    assert (two(1), three(1), again(1)) == (2, 3, 2)
    assert written(given, tmp_path / "run", mine)().score("5")[0] == 30


def test_a_pickle_that_has_changed_is_refused(script: dict[str, Any], tmp_path: Path) -> None:
    given = Given()
    given.named(script["made"](4), "reward", "inner")
    given.write(tmp_path / "run", {})
    [file] = (tmp_path / "run").glob("*.pickle")
    beside = str(tmp_path / "run" / "code.py")
    digest = (tmp_path / "run" / "code.py").read_text().split('"')[3]
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ConfigError, match="is not the file that was written with"):
        opened(beside, file.name, digest, f"{sys.version_info[0]}.{sys.version_info[1]}")
    with pytest.raises(ConfigError, match=r"was written by Python 3.0"):
        opened(beside, file.name, digest, "3.0")


@pytest.mark.heavy
def test_another_process_imports_it_with_the_modules_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("FACTOR = 7\ndef seven(x):\n    return FACTOR * x\n")
    (tmp_path / "scripts" / "train.py").write_text(
        "from beside import FACTOR, seven\nfrom stretto_python.given.files import Given\nfrom pathlib import Path\n"
        "def score(completion):\n    return seven(completion) + FACTOR\n"
        "given = Given()\nprint(given.named(score, 'reward', 'score'), given.named(seven, 'reward', 'seven'))\n"
        "given.write(Path('run'), {})\n"
    )
    train = [sys.executable, "scripts/train.py"]
    names = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert names == ["{given}/code.py:score", "{given}/code.py:seven"]
    look = "from stretto.base.foreign import load_object as load; print(load('run/code.py:score', '')(1))"
    done = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["14"]


def test_a_file_of_code_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward = .*: there is no file .*code.py"):
        load_object(f"{tmp_path}/code.py:score", "reward")
