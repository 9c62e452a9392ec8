"""scripts/launcher_cases.py: which launchers are tried after a change."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "launcher_cases.py"), run_name="launcher_cases")
ALL = ["Slurm", "Ray", "Kubernetes", "by hand"]
ME = ("-c", "user.name=a", "-c", "user.email=a@example.com")


def tried_after(*changed: str) -> list[str]:
    return [case.launcher for case in SCRIPT["find_cases"](changed)]


def git(directory: Path, *words: str) -> None:
    subprocess.run(["git", *ME, *words], cwd=directory, check=True, capture_output=True)


def commit(directory: Path, name: str) -> None:
    (directory / name).write_text("it\n")
    git(directory, "add", name)
    git(directory, "commit", "-m", name)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    directory = tmp_path / "repository"
    directory.mkdir()
    git(directory, "init", "-b", "main")
    commit(directory, "first")
    commit(directory, "second")
    return directory


def test_a_change_is_tried_with_the_launchers_that_use_it() -> None:
    assert tried_after("src/stretto_clusters/slurm/steps.py", "docs/data.md") == ["Slurm"]
    assert tried_after("deploy/helm/stretto/values.yaml", "tests/cluster/on_ray/test_ray.py") == ["Ray", "Kubernetes"]
    assert tried_after("src/stretto/launch/run/supervisor.py") == ALL
    assert tried_after("src/stretto_clusters/ray/run.py", "src/stretto/base/rundir.py") == ALL
    assert tried_after("README.md", "src/stretto_view/page/app.py") == []
    assert [case.launcher for case in SCRIPT["find_cases"](None)] == ALL


def test_files_and_tests_that_are_named_exist() -> None:
    for path in (*SCRIPT["USED_BY_ALL"], *(path for case in SCRIPT["CASES"] for path in case.own)):
        assert (ROOT / path).exists() and path.endswith("/") == (ROOT / path).is_dir(), path
    for case in SCRIPT["CASES"]:
        file, _, name = case.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), case.test


def test_every_launcher_has_a_case() -> None:
    folders = {f"src/stretto_clusters/{path.parent.name}/" for path in ROOT.glob("src/stretto_clusters/*/__init__.py")}
    own = {path for case in SCRIPT["CASES"] for path in case.own}
    assert folders and folders <= own


def test_a_branch_is_compared_with_where_it_left_main(repository: Path) -> None:
    git(repository, "checkout", "-b", "mine")
    commit(repository, "third")
    commit(repository, "fourth")
    (repository / "fifth").touch()  # not yet committed
    assert sorted(SCRIPT["find_changed"](None, repository)) == ["fifth", "fourth", "third"]
    assert sorted(SCRIPT["find_changed"]("HEAD^1", repository)) == ["fifth", "fourth"]


def test_a_merge_into_main_is_compared_with_what_was_there(repository: Path) -> None:
    git(repository, "checkout", "-b", "mine")
    commit(repository, "third")
    commit(repository, "fourth")
    git(repository, "checkout", "main")
    git(repository, "merge", "--no-ff", "mine")
    assert sorted(SCRIPT["find_changed"](None, repository)) == ["fourth", "third"]


def test_without_history_all_is_tried(repository: Path, tmp_path: Path) -> None:
    assert SCRIPT["find_changed"](None, repository) is None  # the tip of main: how much is new is not known
    git(tmp_path, "clone", "--depth", "1", f"file://{repository}", "clone")
    assert SCRIPT["find_changed"](None, tmp_path / "clone") is None
    (tmp_path / "none").mkdir()
    assert SCRIPT["find_changed"](None, tmp_path / "none") is None
    assert SCRIPT["find_changed"]("no-such-commit", repository) is None
