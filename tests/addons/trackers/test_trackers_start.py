"""A run is one run in a tracker; W&B's own environment holds; what cannot start is said before the first step."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.sections.monitors import MonitorsSection, TrackioSection, WandbSection
from stretto.monitors import base
from stretto.monitors.base import build_monitors, find_trackers
from stretto.monitors.monitor import Source, Tracker
from stretto_trackers.wandb import WandbMonitor, find_mode

OWN = ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_DIR", "WANDB_IDENTITY_TOKEN_FILE")
NEEDS_WANDB = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="extra `wandb` is missing")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and working directory, and no variable of W&B."""
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_mode_is_that_of_the_environment_unless_the_section_has_one(monkeypatch) -> None:
    assert find_mode(WandbSection()) == "online"
    for mode in ("offline", "disabled", "dryrun"):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert find_mode(WandbSection()) == mode == WandbMonitor.check_login(WandbSection())
        assert find_mode(WandbSection(offline=False)) == "online"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert find_mode(WandbSection(offline=True)) == "offline"
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ConfigError, match=r"WANDB_MODE=ofline .*online"):
        find_mode(WandbSection())


def test_the_mode_of_the_command_wandb_offline_holds(home: Path) -> None:
    (home / "wandb").mkdir()
    (home / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    assert find_mode(WandbSection()) == "offline"


@NEEDS_WANDB
def test_an_online_run_without_a_key_is_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"no key for api.wandb.ai: set WANDB_API_KEY.*WANDB_MODE=offline"):
        find_trackers(MonitorsSection(wandb=WandbSection()))


def test_a_key_of_the_environment_or_of_a_login_is_found_for_its_host(home: Path, monkeypatch) -> None:
    (home / "netrc").write_text("machine wandb.example.org login user password secret\n")
    with pytest.raises(ConfigError, match=r"api\.wandb\.ai"):
        WandbMonitor.check_login(WandbSection())
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert WandbMonitor.check_login(WandbSection()) == "online at wandb.example.org"
    monkeypatch.delenv("WANDB_BASE_URL")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert WandbMonitor.check_login(WandbSection()) == "online at api.wandb.ai"


@NEEDS_WANDB
@pytest.mark.heavy
@pytest.mark.parametrize(("mode", "num_files"), [("offline", 1), ("disabled", 0)])
def test_a_run_obeys_the_mode_of_the_environment(home: Path, monkeypatch, mode: str, num_files: int) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    run = RunDir(home / "run")
    monitors = build_monitors(MonitorsSection(wandb=WandbSection()), run, "orchestrator", "run")
    monitors.log(1, {"loss": 1.0})
    assert list(monitors._monitors) == ["file", "wandb"]
    monitors.close(timeout_s=60)
    assert len(list(run.path.glob("wandb/offline-run-*/*.wandb"))) == num_files


def test_a_training_run_has_one_name_in_a_tracker_and_evals_beside_it_another(home: Path) -> None:
    names = {role: Source(RunDir(home), role, "run", None).label("run") for role in ("orchestrator", "trainer")}
    assert set(names.values()) == {"run"}
    assert Source(RunDir(home), "eval", "run", None).label("run") == "run-eval"


def test_a_process_whose_metrics_another_one_sends_has_no_tracker(home: Path) -> None:
    section = MonitorsSection(wandb=WandbSection(), trackio=TrackioSection())
    monitors = build_monitors(section, RunDir(home / "run"), "trainer", "run", has_trackers=False)
    assert list(monitors._monitors) == ["file"] and not monitors.has_trackers
    monitors.log(1, {"loss": 0.5})
    monitors.close()
    rows = [*map(json.loads, RunDir(home / "run").metrics("trainer").read_text().splitlines())]
    assert rows[-1]["loss"] == 0.5


class Refusing(Tracker):
    def __init__(self, section: object, source: Source) -> None:
        raise RuntimeError("no space in its database")


def test_a_tracker_that_cannot_start_ends_the_start_of_a_new_run_only(home: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(base, "find_trackers", lambda section: {"trackio": Refusing})
    section = MonitorsSection(trackio=TrackioSection())
    with pytest.raises(ConfigError) as caught:
        build_monitors(section, RunDir(home / "new"), "orchestrator", "run")
    assert str(caught.value) == (
        "[monitors.trackio] cannot start: RuntimeError: no space in its database; mend this or remove the section."
    )
    resumed = build_monitors(section, RunDir(home / "old"), "orchestrator", "run", resumed_step=3)
    while "trackio" in resumed._monitors:
        resumed.log(4, {"loss": 1.0})
    assert list(resumed._monitors) == ["file"] and "no space in its database" in caplog.text
    resumed.close()


@NEEDS_WANDB
def test_a_login_is_looked_for_only_where_the_tracker_is_fed() -> None:
    assert list(find_trackers(MonitorsSection(wandb=WandbSection()), is_fed_here=False)) == ["wandb"]
