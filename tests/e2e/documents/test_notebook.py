"""The notebooks of examples/notebooks run from first cell to last, and learn; they are stored without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pages.blocks import ROOT
from published import smollm2

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
EXECUTE = """
import sys, nbclient, nbformat
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=1800, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""
needs_kernel = pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="no Jupyter kernel"
)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs(notebook: Path) -> None:
    for cell in json.loads(notebook.read_text())["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


def executed(name: str, directory: Path, **env: str) -> list[dict[str, Any]]:
    """The cells of code of a notebook that was run in a directory, with their outputs."""
    places = {place: str(directory / place) for place in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(ROOT / "examples" / "notebooks" / f"{name}.ipynb"), "done.ipynb"],
        cwd=directory,
        env=os.environ | places | env | {"JUPYTER_PLATFORM_DIRS": "1"},
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [cell for cell in json.loads((directory / "done.ipynb").read_text())["cells"] if "outputs" in cell]


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", ())) for output in cell["outputs"])


def drawn(cell: dict[str, Any]) -> str:
    """The HTML of a cell's displays, as they were last drawn."""
    return "".join("".join(output.get("data", {}).get("text/html", ())) for output in cell["outputs"])


def means(cells: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Held-out rewards by mode, as the cell with `run.evals()` prints them."""
    [cell] = [cell for cell in cells if ".evals()" in "".join(cell["source"])]
    rows = [line.split() for line in printed(cell).splitlines()]
    return {mode: [float(mean) for _, own, mean in rows if own == mode] for mode in ("sampled", "greedy")}


def assert_one_display(cell: dict[str, Any]) -> None:
    """A run is one output, with a bar and a curve, and not a line for each step."""
    assert printed(cell) == "" and drawn(cell).count("<svg") == 1 and "polyline" in drawn(cell)


@pytest.mark.slow  # two runs whose processes all import everything
@needs_kernel
def test_a_task_of_ten_lines_is_learned(tmp_path: Path) -> None:
    cells = executed("own_task", tmp_path)
    found = means(cells)
    assert found["sampled"][-1] > found["sampled"][0] + 0.1 and found["greedy"][-1] >= found["greedy"][0], found
    assert_one_display(next(cell for cell in cells if "stretto.rl" in "".join(cell["source"])))
    assert "def places" in (tmp_path / "outputs" / "sort" / "given" / "code.py").read_text()
    assert "'mode': 'greedy'" in "".join(cells[-1]["outputs"][-1]["data"]["text/plain"])


@pytest.mark.slow  # three runs
@needs_kernel
def test_a_run_is_read_while_it_goes_on_and_after_it(tmp_path: Path) -> None:
    cells = executed("reading_a_run", tmp_path)
    [compared], [picture] = cells[-2]["outputs"], cells[-1]["outputs"]
    assert "'run': 'fast'" in "".join(compared["data"]["text/plain"]) and "image/png" in picture["data"]
    assert (tmp_path / "fast-and-slow.png").read_bytes()[:4] == b"\x89PNG"
    assert printed(cells[2]).startswith("running ") and 1 <= int(printed(cells[2]).split()[1]) < 60
    assert_one_display(cells[3])
    found = means(cells)
    assert len(found["greedy"]) == 3
    assert found["sampled"][-1] > found["sampled"][0] + 0.03 and found["greedy"][-1] >= found["greedy"][0], found


@pytest.mark.slow  # twelve steps of a model of 135M parameters
@needs_kernel
def test_a_real_model_learns_what_a_cell_defines(tmp_path: Path) -> None:
    (tmp_path / "cache" / "stretto").mkdir(parents=True)
    (tmp_path / "cache" / "stretto" / "smollm2-135m-instruct").symlink_to(smollm2())
    cells = executed("real_model", tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    found = means(cells)
    assert found["sampled"][-1] > found["sampled"][0] + 0.15, found
    assert "class Count" in (tmp_path / "outputs" / "count-words" / "given" / "code.py").read_text()
    assert len("".join(cells[-1]["outputs"][-1]["data"]["text/plain"])) > 4
