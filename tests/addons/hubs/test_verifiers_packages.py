"""What environments of verifiers name is looked for before anything starts, and nothing of it is imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError
from stretto.check.code import check_plugins
from stretto.config.load import load
from stretto.config.root import OrchestratorConfig
from stretto.envs.checks import missing_for
from stretto.orchestrator.dry_run import preview
from stretto_hubs.verifiers.packages import missing

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="the extra verifiers is not installed"
)


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A taskset in the working directory, which would say so if it were imported."""
    (tmp_path / "my_tasks.py").write_text("import verifiers.v1 as vf\nraise SystemExit\nclass A(vf.Taskset): ...\n")
    monkeypatch.chdir(tmp_path)
    return "my-tasks"


@pytest.mark.parametrize(
    "args",
    [
        {"taskset": "my-tasks"},
        {"taskset": {"id": "owner/My-Tasks@0.2"}},
        {"taskset": {"id": "textarena"}},
        {"taskset": {"id": "my-tasks"}, "agent": {"harness": {"id": "bash"}, "max_turns": 3}},
        {"taskset": {"id": "my-tasks"}, "agent": {"harness": {"id": "in_process"}}},
        {"taskset": {"id": "my-tasks"}, "id": "best-of-n", "solver": {"harness": {"id": "mini_swe_agent"}}},
    ],
)
def test_what_is_installed_is_found_without_an_import(taskset: str, args: dict) -> None:
    assert missing("verifiers", args) == []
    assert "my_tasks" not in sys.modules


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"taskset": "reverse-text-9"}, "args.taskset.id = 'reverse-text-9'"),
        ({"taskset": {"id": "owner/gone@1"}}, "no module 'gone' here"),
        ({"taskset": "my-tasks", "agent": {"harness": {"id": "bsh"}}}, "bash, browser_use"),
        ({"taskset": "my-tasks", "solver": {"harness": {"id": "other-agent"}}}, "args.solver.harness.id"),
        ({"taskset": "my-tasks", "id": "no-such-env"}, "args.id = 'no-such-env'"),
        ({}, "it names no taskset"),
    ],
)
def test_what_is_not_installed_is_named_with_its_key(taskset: str, args: dict, said: str) -> None:
    (text,) = missing("verifiers", args)
    assert said in text


def test_other_environments_have_no_plugins(tmp_path: Path) -> None:
    assert missing_for("sort-letters", {"taskset": "gone"}) == []


def orchestrator(tmp_path: Path, source: str) -> OrchestratorConfig:
    file = tmp_path / "orch.toml"
    file.write_text(f"max_steps = 1\nseq_len = 256\n[model.scratch]\nnum_layers = 1\n{source}")
    return load(OrchestratorConfig, ["@", str(file)])


@needs("prime")
def test_a_dry_run_says_what_is_missing_and_a_start_is_refused(tmp_path: Path, taskset: str) -> None:
    cfg = orchestrator(tmp_path, '[[train.source]]\nenv.taskset.id = "owner/gone@0.1"\n')
    assert cfg.env[0].name == "gone"  # a name that metrics can have
    (task,) = preview(cfg).tasks
    assert any("NOT READY" in note and "'owner/gone@0.1'" in note for note in task.notes)
    with pytest.raises(ConfigError, match=r"environment gone: args\.taskset\.id"):
        check_plugins(cfg)


@pytest.mark.slow
def test_a_dry_run_builds_the_settings_in_a_process_of_its_own(tmp_path: Path, taskset: str) -> None:
    (tmp_path / "my_tasks.py").write_text("import verifiers.v1 as vf\nraise SystemExit('not here')\nvf.Taskset\n")
    envs = [
        "id = 'verifiers:my-tasks'",
        "id = 'verifiers'\nname = 'b'\nargs = {taskset = {id = 'openenv', base_url = 'http://a'}, agent = {}}",
    ]
    cfg = orchestrator(tmp_path, "".join(f"[[env]]\n{env}\n" for env in envs))
    first, second = (task.notes for task in preview(cfg).tasks)
    assert "not here" in str(first) and "NOT READY" in str(first)
    assert "no setting 'agent'; it has" in str(second)
    assert "my_tasks" not in sys.modules


@pytest.mark.heavy
@needs("prime")
def test_held_out_environments_are_looked_at_too(tmp_path: Path, taskset: str) -> None:
    held_out = '[[train.source]]\nenv.taskset.id = "my-tasks"\n[[eval.source]]\nenv.taskset.id = "gone"\n'
    cfg = orchestrator(tmp_path, held_out)
    assert "'gone'" in str(preview(cfg).tasks[-1].notes)
    with pytest.raises(ConfigError, match="'gone'"):
        check_plugins(cfg)
