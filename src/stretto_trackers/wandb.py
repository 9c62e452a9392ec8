"""Weights & Biases: one W&B run per training run, continued after a resume; W&B's own environment holds."""

from __future__ import annotations

import configparser
import io
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stretto.base.errors import ConfigError
from stretto.config.sections.monitors import WandbSection
from stretto.monitors.monitor import Source, TableRow, Tracker, Values
from stretto_trackers import run_id

MODES = ("online", "shared", "offline", "disabled", "dryrun", "run")
WITHOUT_NETWORK = ("offline", "disabled", "dryrun")


class WandbMonitor(Tracker):
    service = "W&B"

    def __init__(self, section: WandbSection, source: Source) -> None:
        import wandb

        name, directory, mode = (section.name or source.run_name, source.run_dir.path / "wandb", find_mode(section))
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=source.label(name),
            group=section.group or name,
            job_type=source.role,
            tags=section.tags,
            config=source.config(),
            dir=str(source.run_dir.path),
            mode=mode,  # type: ignore[arg-type]  # wandb also takes "dryrun" and "run", which its types leave out
            id=run_id(directory / f"{source.role}.id"),
            resume=None if mode in WITHOUT_NETWORK else "allow",
            settings=wandb.Settings(silent=True, init_timeout=120, console="off", disable_git=True),
        )
        # Rows are keyed by our step, not by W&B's counter, which cannot go back after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        import wandb
        from PIL import Image

        def cell(value: Any) -> Any:
            is_images = isinstance(value, tuple)
            return [wandb.Image(Image.open(io.BytesIO(png))) for png in value] if is_images else value

        table = wandb.Table(columns=list(rows[0]), data=[list(map(cell, row.values())) for row in rows])
        self._run.log({"step": step, name: table})

    def log_histograms(self, step: int, values: Mapping[str, Values]) -> None:
        import wandb

        self._run.log({"step": step} | {name: wandb.Histogram(each.tolist()) for name, each in values.items()})

    def close(self) -> None:
        """Finish the W&B run and end W&B's own process, which would otherwise outlive this one."""
        import wandb

        self._run.finish()
        wandb.teardown()

    @staticmethod
    def check_login(section: WandbSection) -> str:
        """The mode of W&B, in words, after a look for what an online run needs; asks no server.

        Raises: ConfigError if the run is online, and there is no key.
        """
        if (mode := find_mode(section)) in WITHOUT_NETWORK:
            return mode
        url = os.environ.get("WANDB_BASE_URL") or _own_settings().get("base_url") or "https://api.wandb.ai"
        host = urlsplit(url).netloc
        if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")) or _has_netrc(host):
            return f"online at {host}"
        raise ConfigError(
            f"[monitors.wandb] has no key for {host}: set WANDB_API_KEY, run `wandb login`, or write without a network "
            "with offline = true or WANDB_MODE=offline (WANDB_MODE=disabled: nothing at all)."
        )


def find_mode(section: WandbSection) -> str:
    """How W&B runs: as the section says, else as WANDB_MODE, else as the files that `wandb offline` writes.

    Raises: ConfigError if WANDB_MODE is no mode of W&B.
    """
    if section.offline is not None:
        return "offline" if section.offline else "online"
    mode = os.environ.get("WANDB_MODE") or _own_settings().get("mode") or "online"
    if mode not in MODES:
        raise ConfigError(f"[monitors.wandb] WANDB_MODE={mode} is no mode of W&B; use one of {', '.join(MODES)}")
    return mode


def _has_netrc(host: str) -> bool:
    """Whether `wandb login` has left a key for the host."""
    named = os.environ.get("NETRC")
    for path in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _own_settings() -> dict[str, str]:
    """Settings in W&B's own files; those of the working directory win over the user's."""
    parser = configparser.ConfigParser(interpolation=None)
    home = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    work = Path(os.environ.get("WANDB_DIR") or ".")
    folder = next((work / name for name in (".wandb", "wandb") if (work / name).is_dir()), work / "wandb")
    try:
        parser.read([home / "settings", folder / "settings"])
    except (OSError, configparser.Error, UnicodeDecodeError):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}
