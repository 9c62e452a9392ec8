"""`python -m tests.gpu [--out FILE] [words for pytest]`: every test that needs a GPU, within eight minutes, as JSON.

The file has the outcome, seconds and figures of each test as soon as it has ended, so that nothing is lost if the
machine is taken back. What has passed in it on this kind of GPU with these packages is not run again: call the command
until the last line, the file as one line, has nothing skipped for time (after a change of the code, give another file).
The tests come in the order of what they would find; none begins when the time is over, and if one has not ended half a
minute later, the command shows where it stands and ends. What did not end comes last in the next call.

Needs a GPU, torch for it, pytest, and what the trainer imports; what else is missing skips the tests that need it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LIMIT_S = 480.0
OVER_S = 30.0
"""How long a test may go on when the time is over."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "pydantic", "msgspec", "pyzmq", "pytest", "vllm")
ORDER = ("steps", "run", "ipc", "row_kernels", "fp8", "trees", "memory", "snapshots", "vllm_gpu", "megatron", "vllm")
"""Words of files' names: what breaks a run first, then what makes it fast, last what takes minutes to start."""
LATE = "the time is over"
BEGUN = "begun"
"""The outcome of a test that has not ended, and of one that never did."""


class Summary:
    """Outcome, seconds and figures of every test, in a file that is complete after each of them."""

    def __init__(self, out: Path, about: dict[str, Any], limit_s: float = LIMIT_S) -> None:
        """about: the machine and its packages; results in the file from others are not kept."""
        out.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(out.read_text()) if out.exists() else {}
        self._out, self._about = out, about
        is_same = all(known.get(key) == about[key] for key in ("device", "versions"))
        self.tests: dict[str, dict[str, Any]] = known["tests"] if is_same else {}
        self._start = time.monotonic()
        self._end = self._start + limit_s

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        passed, begun = (
            {name for name, test in self.tests.items() if test["outcome"] == outcome} for outcome in ("passed", BEGUN)
        )
        left = [item for item in items if _name(item.nodeid) not in passed]
        # One that hangs would keep all behind it from beginning, in every call.
        items[:] = sorted(left, key=lambda item: (_name(item.nodeid) in begun, _place(item)))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._end:
            pytest.skip(LATE)
        self.tests[_name(item.nodeid)] = {"outcome": BEGUN, "s": 0.0}
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _name(report.nodeid)
        if report.when == "setup":
            self.tests.pop(name, None)  # of an earlier call
        found = self.tests.setdefault(name, {"outcome": "passed", "s": 0.0})
        found["s"] = round(found["s"] + report.duration, 2)
        if report.outcome != "passed":
            found["outcome"] = report.outcome
            found["why"] = report.longreprtext.strip().splitlines()[-1][-300:] if report.longreprtext else ""
        if report.when == "teardown":
            if report.user_properties:
                found["figures"] = dict(report.user_properties)
            self.write()

    def write(self) -> dict[str, Any]:
        """Write the file; what is in it."""
        outcomes = [test["outcome"] for test in self.tests.values()]
        whole = self._about | {
            "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
            "s": round(time.monotonic() - self._start, 1),
            "tests": self.tests,
        }
        partial = self._out.with_suffix(".part")
        partial.write_text(json.dumps(whole, indent=1) + "\n")
        partial.replace(self._out)
        return whole


def _name(nodeid: str) -> str:
    """The test without the folders of its file."""
    file, _, test = nodeid.partition("::")
    return f"{file.rpartition('/')[2]}::{test}"


def _place(item: pytest.Item) -> int:
    return next((place for place, word in enumerate(ORDER) if word in item.path.name), len(ORDER))


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-tests.json"))
    args, words = parser.parse_known_args()
    # A thread without Python, so that a test that hangs in a call ends too; the file has all that came before it.
    faulthandler.dump_traceback_later(LIMIT_S + OVER_S, exit=True, file=os.dup(2))
    if not torch.cuda.is_available():
        print(json.dumps({"device": None, "why": f"torch {torch.__version__} sees no CUDA device"}))
        return 2
    about = {
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "cuda": torch.version.cuda,
        "versions": {"python": platform.python_version()} | _versions(),
    }
    summary = Summary(args.out, about)
    # A driver's or a library's warning is no fault of the code under test.
    places = [str(HERE), str(HERE.parent / "wires" / "test_ipc.py")]
    code = pytest.main(
        [*places, "-q", "-W", "default", "-p", "no:cacheprovider", "-p", "no:faulthandler", *words], plugins=[summary]
    )
    found = summary.write()
    print(json.dumps(found))
    left = any(test.get("why", "").endswith(LATE) for test in found["tests"].values())
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and found["tests"] and not left else int(code)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
