"""Pictures of what `algorithms.py` has measured: a heat map of credits and losses, and dots in a colour per loss.

    python benchmarks/algorithm_pictures.py [--out docs/algorithms-pairs.png] [--seeds-out docs/algorithms-seeds.png]

Draws the tables in README.md, so that text and picture cannot differ. `algorithms.py --picture` draws its own rows with
the same functions; with rows of several seeds a dot is a run, and the heat map has their mean.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

README = Path(__file__).with_name("README.md")
COLORS = {
    "default": "#1f5fa8",
    "ipo": "#7b4fa3",
    "ppo": "#2a9d6f",
    "gspo": "#c98a1b",
    "cispo": "#4f7c8a",
    "reinforce": "#d1495b",
    "reinforce+tis": "#e39aa5",
    "reinforce+icepop": "#8a5a44",
}
"""One colour per loss, in every picture."""


class Cell(NamedTuple):
    """A run: held-out reward of a credit and a loss after training, and of its start."""

    task: str
    credit: str
    loss: str
    before: float
    after: float


def cells_of_tables(page: str) -> list[Cell]:
    """The tables of credits and losses on the page; each follows a line that names its task and its start."""
    cells, above = [], ""
    pattern = (
        r"`python benchmarks/algorithms.py --task (\S+) --only combinations"
        r".*?from\s+([\d.]+);.*?\n\n(\| credit \|.*?)\n\n"
    )
    for task, before, table in re.findall(pattern, page, re.S):
        head, _, *lines = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]
        losses = [name.replace("... with TIS", "reinforce+tis") for name in head[1:]]
        for credit, *values in lines:
            if credit.startswith("..."):
                credit = f"{above} {credit.removeprefix('... ')}"
            else:
                above = credit
            cells += [Cell(task, credit, loss, float(before), float(v)) for loss, v in zip(losses, values)]
    return cells


def cells_of_rows(rows: Sequence[dict[str, Any]]) -> list[Cell]:
    """Those rows of `algorithms.py` that are a pair of a credit and a loss."""
    pairs = [(row, *row["name"].split(" x ")) for row in rows if " x " in row["name"]]
    return [Cell(row["task"], credit, loss, row["before"], row["after"]) for row, credit, loss in pairs]


class Seeds(NamedTuple):
    """A loss on several seeds: held-out reward of each before and after training."""

    task: str
    loss: str
    before: list[float]
    after: list[float]


def seeds_of_table(page: str) -> list[Seeds]:
    """The table of losses on several seeds: a line per task and loss, `before -> after` per seed."""
    lines = re.findall(r"^\| `(\S+)` with `(\S+)`( with TIS)? ((?:\| [\d.]+ -> [\d.]+ )+)\|", page, re.M)
    found = []
    for task, loss, tis, values in lines:
        pairs = [[float(value) for value in pair] for pair in re.findall(r"([\d.]+) -> ([\d.]+)", values)]
        before, after = map(list, zip(*pairs))
        found.append(Seeds(task, loss + "+tis" * bool(tis), before, after))
    return found


def against_mean(found: Sequence[Seeds]) -> dict[str, list[float]]:
    """By loss of one task: its rewards after training, minus the mean of all losses on the same seed.

    Seeds begin and end at different rewards; a loss is better than another if it is so on the same seeds.
    """
    means = [statistics.fmean(values) for values in zip(*(each.after for each in found))]
    return {each.loss: [value - mean for value, mean in zip(each.after, means)] for each in found}


def summary(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, as in the table."""
    return f"{statistics.fmean(values):+.3f} ± {statistics.stdev(values):.3f}"


def draw_seeds(found: Sequence[Seeds], path: Path) -> None:
    """Per task a line per loss: a dot per seed, a bar at their mean, and a line of one deviation to each side."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(each.task for each in found))
    figure = Figure(figsize=(5.5 * len(tasks) + 2, 3.6), dpi=110, layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        values = against_mean([each for each in found if each.task == task])
        for height, (loss, own) in enumerate(values.items()):
            mean, spread, line = statistics.fmean(own), statistics.stdev(own), [height, height]
            axes.plot([mean - spread, mean + spread], line, color=COLORS[loss], linewidth=1.5)
            axes.plot([mean], [height], "|", color=COLORS[loss], markersize=16, markeredgewidth=2.5)
            axes.plot(own, [height] * len(own), "o", color=COLORS[loss], markersize=6, alpha=0.7)
        axes.axvline(0, color="#666666", linewidth=1, linestyle="--")
        axes.set_title(f"{task}, grpo, {len(own)} seeds", loc="left", fontsize=11)
        axes.set_yticks(range(len(values)), list(values))
        _finish_dots(axes, "held-out reward minus the mean of all losses on the same seed", "loss")
    figure.savefig(path)


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Per task a heat map (mean over runs) and, beside it, a dot per run."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell.task for cell in cells))
    num_credits = len({cell.credit for cell in cells})
    figure = Figure(figsize=(13, (1.6 + 0.42 * num_credits) * len(tasks)), dpi=110, layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    for (left, right), task in zip(panels, tasks):
        own = [cell for cell in cells if cell.task == task]
        _heat_map(left, own)
        _dots(right, own)
        left.set_title(f"{task}: held-out reward after training", loc="left", fontsize=11)
        right.set_title(f"{task}: one dot per run", loc="left", fontsize=11)
    lines = {line.get_label(): line for axes in panels.flat for line in axes.get_legend_handles_labels()[0]}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)
    figure.savefig(path)


def _names(cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    losses = [loss for loss in COLORS if any(cell.loss == loss for cell in cells)]
    return list(dict.fromkeys(cell.credit for cell in cells)), losses


def _heat_map(axes: Any, cells: Sequence[Cell]) -> None:
    credits, losses = _names(cells)
    runs: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        runs.setdefault((cell.credit, cell.loss), []).append(cell.after)
    means = {pair: statistics.fmean(values) for pair, values in runs.items()}
    values = [[means.get((credit, loss), math.nan) for loss in losses] for credit in credits]
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    middle = (min(means.values()) + max(means.values())) / 2
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if not math.isnan(value):
                color = "black" if value > middle else "white"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(len(losses)), losses, rotation=20, ha="right")
    axes.set_yticks(range(len(credits)), credits)
    axes.set_xlabel("loss")
    axes.set_ylabel("credit")
    axes.figure.colorbar(image, ax=axes, label="mean held-out reward", shrink=0.9)


def _dots(axes: Any, cells: Sequence[Cell]) -> None:
    credits, losses = _names(cells)
    for number, loss in enumerate(losses):
        own = [cell for cell in cells if cell.loss == loss]
        heights = [credits.index(cell.credit) + 0.09 * (number - (len(losses) - 1) / 2) for cell in own]
        axes.plot([cell.after for cell in own], heights, "o", color=COLORS[loss], markersize=6, label=loss)
    start = statistics.fmean(cell.before for cell in cells)
    axes.axvline(start, color="#666666", linewidth=1, linestyle="--", label="before training")
    axes.set_yticks(range(len(credits)), credits)
    _finish_dots(axes, "held-out reward after training", "credit")


def _finish_dots(axes: Any, x: str, y: str) -> None:
    axes.invert_yaxis()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=README.parents[1] / "docs" / "algorithms-pairs.png")
    parser.add_argument("--seeds-out", type=Path, default=README.parents[1] / "docs" / "algorithms-seeds.png")
    args, page = parser.parse_args(), README.read_text()
    draw(cells_of_tables(page), args.out)
    draw_seeds(seeds_of_table(page), args.seeds_out)


if __name__ == "__main__":
    main()
