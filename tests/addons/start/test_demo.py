"""`stretto demo`: which commands it runs, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto import cli
from stretto_start import demo as demos

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[3]


def test_every_example_of_the_repository_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    folders = {path.parent.name for path in ROOT.glob("examples/*/rl.toml")}
    assert set(demos.examples()) == folders
    assert cli.main(["demo", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name}\n" in shown for name in folders)


def test_an_example_that_is_not_there_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "gsm9k"]) == 2
    message = capsys.readouterr().err
    assert "there is no example 'gsm9k'; choose " in message and "sort_letters" in message


@needs("sft")
def test_both_stages_are_run_with_the_given_keys_and_a_failure_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["demo", "reverse-text", "--max-steps", "5", "--print-config"]) == 0
    shown = capfd.readouterr().out
    assert 'id = "reverse-text"' in shown and shown.count("max_steps = 5\n") == 2
    assert 'name = "outputs/reverse-text-sft/weights/latest"' in shown
    assert cli.main(["demo", "--max-stepz", "5"]) == 2
    message = capfd.readouterr().err
    assert message.count("unknown flag") == 1 and "`stretto sft`" in message


def test_a_signal_to_the_command_ends_its_child(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import pathlib, time\npathlib.Path('up').touch()\ntime.sleep(600)\n")
    code = "import sys; from stretto_start import demo; sys.exit(demo._run([sys.executable, 'child.py']))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as command:
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 128 + signal.SIGTERM
