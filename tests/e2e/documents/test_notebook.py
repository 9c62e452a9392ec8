"""docs/analyse.ipynb runs from its first cell to its last in a kernel, and is stored without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages.blocks import ROOT

NOTEBOOK = ROOT / "docs" / "analyse.ipynb"
EXECUTE = """
import sys, nbclient, nbformat
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


def test_it_is_stored_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


@pytest.mark.slow  # three runs whose processes all import everything; e2e/test_script.py does the same from a script
@pytest.mark.skipif(find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="no Jupyter kernel")
def test_it_runs(tmp_path: Path) -> None:
    places = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK), "done.ipynb"],
        cwd=tmp_path,
        env=os.environ | places | {"JUPYTER_PLATFORM_DIRS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [cell for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"] if "outputs" in cell]
    [compared], [picture] = cells[-2]["outputs"], cells[-1]["outputs"]
    assert "'run': 'fast'" in "".join(compared["data"]["text/plain"]) and "image/png" in picture["data"]
    assert (tmp_path / "fast-and-slow.png").read_bytes()[:4] == b"\x89PNG"
    said = ["".join("".join(output.get("text", ())) for output in cell["outputs"]) for cell in cells]
    evals = [line.split() for line in said[-3].splitlines()]
    means = {how: [float(mean) for _, mode, mean in evals if mode == how] for how in ("sampled", "greedy")}
    assert len(means["greedy"]) == 3
    assert means["sampled"][-1] > means["sampled"][0] + 0.03 and means["greedy"][-1] >= means["greedy"][0], means
