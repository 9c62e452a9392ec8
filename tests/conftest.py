"""What all tests share: few threads, a package that is found without being installed, and nothing left behind."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# What is imported and collected stays to the end: no garbage collection needs to look at it, now or later.
gc.disable()

# Early: pytest compiles it at its very end otherwise, where CPython 3.11's parser now and then fails.
try:
    import hypothesis
except ImportError:  # a machine with a GPU and little else: python -m tests.gpu
    hypothesis = None
else:  # an example that takes long on a busy machine is not wrong
    hypothesis.settings.register_profile("stretto", deadline=None)
    hypothesis.settings.load_profile("stretto")

# Before anything imports torch: threads that spin slow down everything else on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("STRETTO_VIEW", "0")  # no page beside the runs of tests

SOURCE = Path(__file__).parents[1] / "src"
if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))
# Tests start processes, which must find the package too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))

FILE_MARKS = re.compile(r"^pytestmark = .*", re.M)
ONE_SITE = dict.fromkeys(("test_site.py", "test_search.py"), "site")
MARK = re.compile(r"pytest\.mark\.(\w+)")
ROOMS_OF_PARTS = {"unit", "addons"}
"""Folders in which a test that takes a tenth of a second is marked `heavy`."""

# Where beartype is not installed nothing is checked: python -m tests.gpu needs little else than torch.
if find_spec("beartype") and find_spec("jaxtyping"):
    sys.path.insert(0, str(Path(__file__).parent))
    from shapes import ROOMS, check_shapes

    check_shapes(*ROOMS)

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start too, which is sent it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A session that leaves something behind fails.
from processes.leftovers import pytest_configure, pytest_sessionfinish  # noqa: E402, F401  (hooks; they need the package)

# The same examples every time where a run must not depend on luck; new ones at a developer's desk.
if hypothesis is not None:
    hypothesis.settings.register_profile("ci", derandomize=True)
    if os.environ.get("CI"):
        hypothesis.settings.load_profile("ci")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which `-m` leaves nothing is not imported: one whose `pytestmark` is a mark that must not be there."""
    if collection_path.suffix != ".py" or " or " in (chosen := config.getoption("markexpr")) or "(" in chosen:
        return None
    found = FILE_MARKS.search(collection_path.read_text())
    marks = MARK.findall(found[0]) if found else ()
    return True if any(f"not {mark}" in chosen.split(" and ") for mark in marks) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of quick tests come last: no worker of xdist is still at a long file when the others have ended."""
    are_quick = {item.path: ROOMS_OF_PARTS & set(item.path.parts) for item in items}
    are_quick |= {item.path: set() for item in items if item.get_closest_marker("heavy")}
    items.sort(key=lambda item: bool(are_quick[item.path]))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # Python's own 700 takes a thirtieth of the time
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """As `--dist loadfile`, but one worker imports vLLM and gets what is tested with it, and one builds the site."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "vllm" if "[vllm" in nodeid else ONE_SITE.get(Path(file).name, file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def the_environment_is_each_tests_own():
    """A verb that runs within a test sets variables for its processes, which would change what the next test does."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def log_handlers_end_with_their_test():
    """A handler that writes to the captured output of a test would fail in the next one."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in before:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level)


@pytest.fixture(autouse=True)
def metrics_are_listed(request, monkeypatch):
    """Every metric that runs within these tests write is on the page of metrics."""
    if not {"orchestrator", "trainer"} & set(request.path.parts[-3:-1]):
        yield
        return
    from cases.metric_names import unlisted

    from stretto.monitors.file import MetricsFile

    missing: list[str] = []
    opened, logged = MetricsFile.__init__, MetricsFile.log

    def open_file(self, path, **kwargs) -> None:
        opened(self, path, **kwargs)
        self.role = path.stem

    def log(self, step, metrics) -> None:
        missing.extend(unlisted(self.role, metrics))
        logged(self, step, metrics)

    monkeypatch.setattr(MetricsFile, "__init__", open_file)
    monkeypatch.setattr(MetricsFile, "log", log)
    yield
    assert not missing, f"without an entry in monitors/catalog.py: {missing}"
