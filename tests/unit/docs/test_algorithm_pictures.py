"""The pictures of the algorithms are drawn from the tables of benchmarks/README.md, and from rows of a measurement."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from pages.blocks import ROOT

pytestmark = pytest.mark.heavy


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import algorithm_pictures

    return algorithm_pictures


def test_the_tables_are_read(pictures: ModuleType, tmp_path: Path) -> None:
    cells = pictures.cells_of_tables((ROOT / "benchmarks" / "README.md").read_text())
    assert len(cells) == len(set(cells)) == 2 * 8 * 7
    assert pictures.Cell("reverse-text", "rae", "reinforce", 0.680, 0.161) in cells
    assert pictures.Cell("arithmetic", "grpo with the deviation", "reinforce+tis", 0.233, 0.349) in cells
    pictures.draw(cells, tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").read_bytes()[:4] == b"\x89PNG"


def test_seeds_are_read_and_their_mean_and_deviation_are_those_of_the_table(
    pictures: ModuleType, tmp_path: Path
) -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    found = pictures.seeds_of_table(page)
    losses = [name for name in pictures.COLORS if "icepop" not in name]
    assert found and [each.loss for each in found] == losses * (len(found) // len(losses))
    assert all(len(each.before) == len(each.after) >= 3 for each in found)
    for task in {each.task for each in found}:
        for loss, values in pictures.against_mean([each for each in found if each.task == task]).items():
            assert f"| {pictures.summary(values)} |" in page, (task, loss)
    pictures.draw_seeds(found, tmp_path / "seeds.png")
    assert (tmp_path / "seeds.png").read_bytes()[:4] == b"\x89PNG"


def test_a_loss_has_its_colour_and_a_run_its_dot(
    pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[str, str, int]] = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes,
        "plot",
        lambda self, x, y, *args, **style: (
            drawn.append((style["label"], style["color"], len(x))) or plot(self, x, y, *args, **style)
        ),
    )
    rows = [
        {"task": "sums", "name": f"{credit} x {loss}", "before": 0.1, "after": after}
        for credit, loss, after in (("grpo", "ppo", 0.3), ("grpo", "ppo", 0.4), ("rloo", "gspo", 0.2))
    ]
    pictures.draw(pictures.cells_of_rows([*rows, {"name": "zero (control)"}]), tmp_path / "pairs.png")
    assert drawn == [("ppo", pictures.COLORS["ppo"], 2), ("gspo", pictures.COLORS["gspo"], 1)]
