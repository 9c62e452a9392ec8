"""What all tests share: few threads, and a package that is found without being installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Early: pytest compiles it at its very end otherwise, where CPython 3.11's parser now and then fails.
import hypothesis

# Before anything imports torch: threads that spin slow down everything else on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SOURCE = Path(__file__).parents[1] / "src"
if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))
# Tests start processes, which must find the package too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))

# The same examples every time where a run must not depend on luck; new ones at a developer's desk.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
