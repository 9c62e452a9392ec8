"""`python -m tests.gpu`: every test that needs a GPU, within eight minutes, and a summary as JSON on the last line.

Needs a GPU, torch for it, pytest, and what the trainer imports; what else is missing skips the tests that need it.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LIMIT_S = 480.0
PACKAGES = ("torch", "triton", "transformers", "numpy", "pydantic", "msgspec", "pyzmq", "pytest")


class Summary:
    """Outcome, seconds and figures of every test; what does not fit into the time is skipped."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._end = time.monotonic() + LIMIT_S

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._end:
            pytest.skip(f"the {LIMIT_S:.0f} s were over")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.tests.setdefault(report.nodeid.rpartition("/")[2], {"outcome": "passed", "s": 0.0})
        found["s"] = round(found["s"] + report.duration, 2)
        if report.outcome != "passed":
            found["outcome"] = report.outcome
            found["why"] = report.longreprtext.strip().splitlines()[-1][-300:] if report.longreprtext else ""
        if report.when == "teardown" and report.user_properties:
            found["figures"] = dict(report.user_properties)


def main() -> int:
    import torch

    if not torch.cuda.is_available():
        print(json.dumps({"device": None, "why": f"torch {torch.__version__} sees no CUDA device"}))
        return 2
    summary, start = Summary(), time.monotonic()
    # A driver's or a library's warning is no fault of the code under test.
    words = [
        str(HERE),
        str(HERE.parent / "wires" / "test_ipc.py"),
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        *sys.argv[1:],
    ]
    code = pytest.main(words, plugins=[summary])
    outcomes = [test["outcome"] for test in summary.tests.values()]
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "capability": torch.cuda.get_device_capability(),
                "cuda": torch.version.cuda,
                "versions": {"python": platform.python_version()} | _versions(),
                "outcomes": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
                "s": round(time.monotonic() - start, 1),
                "tests": summary.tests,
            }
        )
    )
    return int(code)


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
