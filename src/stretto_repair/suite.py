"""Runs a package's tests in the sandbox: which pass.

The modules that are tested run in the process that reports, as with any test. The report is written by a copy of
standard output that tests do not know, after a word that is made for each run: a module that prints a report, or ends
the process, is not believed. Code that is written to look for that word in its process can find it.
"""

from __future__ import annotations

import json
import secrets
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stretto_repair.bank import Package
from stretto_repair.workspace import Workspace
from stretto_sandbox.sandbox import Sandbox, interpreter

RUNNER = """
import json, os, sys
request = json.load(sys.stdin)
word, report = request.pop("word"), os.fdopen(os.dup(1), "w")
sys.path += [request["lib"], *map(os.path.abspath, request["roots"])]
nothing = os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)
os.dup2(nothing, 2)
import pytest


class Outcomes:
    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        is_over = report.when == "call" or report.outcome != "passed"
        if is_over and self.found.get(report.nodeid) != "failed":
            is_expected = hasattr(report, "wasxfail")
            self.found[report.nodeid] = "skipped" if is_expected else report.outcome


outcomes = Outcomes()
pytest.main([*request["options"], *request["tests"]], plugins=[outcomes])
print(word + json.dumps(outcomes.found), file=report, flush=True)
os._exit(0)
"""
OPTIONS = ("-c", "/dev/null", "--rootdir=.", "--confcutdir=.", "-p", "no:cacheprovider", "--color=no")
"""Without the package's settings, which may name plugins that are not here."""


def environment(work: str, lib: str, roots: Sequence[str]) -> dict[str, str]:
    """Variables with which `python -m pytest` in the directory `work` runs as the score does."""
    python = interpreter()[0]
    return {
        "PATH": f"{Path(python).parent}:/usr/bin:/bin",
        "PYTHONPATH": ":".join([lib, *(work if root == "." else f"{work}/{root}" for root in roots)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": shlex.join(OPTIONS).replace("dir=.", f"dir={shlex.quote(work)}"),
    }


async def outcomes_of(sandbox: Sandbox, package: Package, files: Mapping[str, bytes], lib: str) -> dict[str, str]:
    """How each test ends with these files of a package: passed, failed or skipped. Empty if the tests do not end.

    Raises: EnvError if the sandbox cannot be built.
    """
    word = secrets.token_hex(16)
    options, tests = [*OPTIONS, "-q"], package.row.tests
    request = {"word": word, "lib": lib, "roots": package.roots, "options": options, "tests": tests}
    program = [interpreter()[0], "-s", "-S", "-B", "-c", RUNNER]
    variables = {"PYTHONHASHSEED": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    report = ""

    async def act() -> str:
        nonlocal report
        result = await work.run(program, stdin=json.dumps(request), env=variables)
        report = result.stdout if result.is_ok else ""
        return ""

    with tempfile.TemporaryDirectory(prefix="stretto-tests-") as home:
        Path(home).chmod(0o711)
        async with Workspace(Path(home), files, sandbox, origin=b"", readable=[lib]) as work:
            await work.step(b"", act)
    return json.loads(report.removeprefix(word)) if report.startswith(word) else {}
