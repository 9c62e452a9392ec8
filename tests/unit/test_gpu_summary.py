"""`python -m tests.gpu` keeps the result of each test as it ends, and goes on with those that are left."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[1] / "gpu"
GPU = runpy.run_path(str(FOLDER / "__main__.py"), run_name="tests.gpu")
ABOUT = {"device": "a GPU", "versions": {}}
STEPS, LATE, RUN = (
    "gpu/test_steps_gpu.py::test_sums",
    "gpu/test_vllm_adapters_gpu.py::test_late",
    "gpu/test_run_gpu.py::test_rl",
)


def ended(summary, nodeid: str, *, why: str | None = None, skipped: str | None = None, figures=()) -> None:
    """Give the summary the reports of one test, as pytest does."""
    for when in ("setup", "call", "teardown"):
        outcome = "failed" if why and when == "call" else "skipped" if skipped and when == "setup" else "passed"
        text = {"failed": why, "skipped": skipped}.get(outcome)
        report = pytest.TestReport(nodeid, ("", 0, ""), {}, outcome, text, when, duration=0.25, user_properties=figures)
        summary.pytest_runtest_logreport(report)


def test_each_test_is_in_the_file_as_soon_as_it_has_ended(tmp_path):
    out = tmp_path / "found.json"
    summary = GPU["Summary"](out, ABOUT)
    ended(summary, STEPS, figures=(("mean", 0.5),))
    assert json.loads(out.read_text())["tests"] == {
        "test_steps_gpu.py::test_sums": {"outcome": "passed", "s": 0.75, "figures": {"mean": 0.5}}
    }
    ended(summary, RUN, why="a trace\nE  assert 1 == 2")
    found = json.loads(out.read_text())
    assert found["outcomes"] == {"failed": 1, "passed": 1} and found["device"] == "a GPU"
    assert found["tests"]["test_run_gpu.py::test_rl"]["why"] == "E  assert 1 == 2"


def test_what_has_passed_on_this_kind_of_gpu_is_not_run_again_and_the_most_telling_comes_first(tmp_path):
    out = tmp_path / "found.json"
    summary = GPU["Summary"](out, ABOUT)
    ended(summary, STEPS)
    ended(summary, RUN, why="broken")
    all_items = [SimpleNamespace(nodeid=nodeid, path=Path(nodeid.partition("::")[0])) for nodeid in (LATE, RUN, STEPS)]
    left = {}
    for about in (ABOUT, ABOUT | {"device": "another"}):
        items = list(all_items)
        GPU["Summary"](out, about).pytest_collection_modifyitems(items)
        left[about["device"]] = [item.nodeid for item in items]
    assert left == {"a GPU": [RUN, LATE], "another": [STEPS, RUN, LATE]}
    again = GPU["Summary"](out, ABOUT)
    ended(again, RUN)
    assert json.loads(out.read_text())["outcomes"] == {"passed": 2}
    assert json.loads(out.read_text())["tests"]["test_run_gpu.py::test_rl"] == {"outcome": "passed", "s": 0.75}


def test_no_test_begins_when_the_time_is_over(tmp_path):
    summary = GPU["Summary"](tmp_path / "found.json", ABOUT, -1.0)
    with pytest.raises(pytest.skip.Exception, match=GPU["LATE"]):
        summary.pytest_runtest_setup(SimpleNamespace(nodeid=STEPS))
    GPU["Summary"](tmp_path / "found.json", ABOUT, 100.0).pytest_runtest_setup(SimpleNamespace(nodeid=STEPS))


def test_what_did_not_end_comes_last_in_the_next_call(tmp_path):
    out = tmp_path / "new" / "found.json"
    GPU["Summary"](out, ABOUT).pytest_runtest_setup(SimpleNamespace(nodeid=STEPS))  # it hangs, and the command ends
    assert json.loads(out.read_text())["outcomes"] == {"begun": 1}
    again = GPU["Summary"](out, ABOUT)
    items = [SimpleNamespace(nodeid=nodeid, path=Path(nodeid.partition("::")[0])) for nodeid in (STEPS, RUN)]
    again.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [RUN, STEPS]
    again.pytest_runtest_setup(items[1])
    ended(again, STEPS)
    assert json.loads(out.read_text())["outcomes"] == {"passed": 1}


def test_what_has_passed_with_other_packages_is_run_again(tmp_path):
    out = tmp_path / "found.json"
    ended(GPU["Summary"](out, ABOUT), STEPS)
    assert GPU["Summary"](out, ABOUT).tests
    assert not GPU["Summary"](out, ABOUT | {"versions": {"torch": "2.13.0"}}).tests


def test_every_file_of_tests_for_gpus_has_a_place():
    for path in FOLDER.glob("test_*.py"):
        assert any(word in path.name for word in GPU["ORDER"]), path
