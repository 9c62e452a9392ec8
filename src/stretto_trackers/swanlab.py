"""SwanLab: one experiment per training run, continued after a resume; SwanLab's own environment holds."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stretto.base.errors import ConfigError
from stretto.config.sections.monitors import SwanlabSection
from stretto.monitors.monitor import Source, TableRow, Tracker, Values, images_of, without_images
from stretto_trackers import run_id

MODES = ("online", "offline", "local", "disabled")
WITHOUT_NETWORK = ("offline", "local", "disabled")
NUM_BINS = 30  # of a histogram
KEY_VAR = "SWANLAB_API_KEY"


class SwanlabMonitor(Tracker):
    service = "SwanLab"

    def __init__(self, section: SwanlabSection, source: Source) -> None:
        import swanlab

        folder = source.run_dir.path / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        mode, name = find_mode(section), section.name or source.run_name
        self._run = swanlab.init(
            project=section.project,
            workspace=section.workspace,
            name=source.label(name),
            config=source.config(),
            log_dir=str(folder),
            mode=mode,  # type: ignore[arg-type]  # find_mode has checked it
            id=run_id(folder / f"{source.role}.id"),
            resume="never" if mode in WITHOUT_NETWORK else "allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if not isinstance(value, str)}, step=step)

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        """Rows as a table `name`, and their images under `name/images`."""
        import swanlab
        from PIL import Image

        plain = [without_images(row) for row in rows]
        table = swanlab.echarts.Table()
        table.add(list(plain[0]), [list(row.values()) for row in plain])
        shown: dict[str, object] = {name: table}
        pictures = [Image.open(io.BytesIO(png)) for row in rows for png in images_of(row)]
        if pictures:
            shown[f"{name}/images"] = [swanlab.Image(each) for each in pictures]
        self._run.log(shown, step=step)

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        import swanlab

        charts = {}
        for name, each in values.items():
            counts, edges = np.histogram(each, bins=NUM_BINS)
            bar = swanlab.echarts.Bar()
            bar.add_xaxis([f"{edge:.4g}" for edge in edges[:-1]])
            bar.add_yaxis(name, counts.tolist())
            charts[f"{name}/histogram"] = bar
        self._run.log(charts, step=step)

    def close(self) -> None:
        self._run.finish()

    @staticmethod
    def check_login(section: SwanlabSection) -> str:
        """The mode of SwanLab, after a look for what an online run needs; asks no server.

        Raises: ConfigError if the run is online, and there is no key.
        """
        mode = find_mode(section)
        home = Path(os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser()
        if mode in WITHOUT_NETWORK or os.environ.get(KEY_VAR) or (home / ".netrc").exists():
            return mode
        raise ConfigError(
            f"[monitors.swanlab] has no key: set {KEY_VAR}, run `swanlab login`, or write without a network with "
            "offline = true or SWANLAB_MODE=offline (SWANLAB_MODE=disabled: nothing at all)."
        )


def find_mode(section: SwanlabSection) -> str:
    """How SwanLab runs: as the section says, else as SWANLAB_MODE, else online.

    Raises: ConfigError if SWANLAB_MODE is no mode of SwanLab.
    """
    if section.offline is not None:
        return "offline" if section.offline else "online"
    mode = os.environ.get("SWANLAB_MODE") or "online"
    if mode not in MODES:
        raise ConfigError(
            f"[monitors.swanlab] SWANLAB_MODE={mode} is no mode of SwanLab; use one of {', '.join(MODES)}"
        )
    return mode
