"""A run's secret: one for all of its processes, for nobody else, and never in what a person or a tracker sees."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from stretto.base import rundir
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.secret import MIN_CHARS, SECRET_VAR, Secret, find_secret, load_secret, without_secret
from stretto.config.load import load
from stretto.config.masks import masked
from stretto.config.root import RLConfig
from stretto.launch.plan import plan as planning
from stretto.launch.plan.nodes import plan_nodes
from stretto.launch.plan.table import table

GIVEN = "given" * 10


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.delenv(SECRET_VAR, raising=False)
    return RunDir(tmp_path / "run")


def test_processes_that_start_together_get_one_secret_which_only_the_user_can_read(run: RunDir) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(load_secret(run).text_key("x"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and len(set(found)) == 1
    assert stat.S_IMODE(run.secret.stat().st_mode) == 0o600


def test_a_secret_that_was_being_written_when_its_process_was_killed_is_written_anew(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(_: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # nothing is tidied up after a kill
        with pytest.raises(Killed):
            load_secret(run)
    assert not run.secret.exists() and len(list(run.path.iterdir())) == 1
    assert load_secret(run).text_key("x") == load_secret(run).text_key("x")


def test_a_full_disk_leaves_no_part_of_a_secret(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill)
        with pytest.raises(OSError, match="No space left"):
            load_secret(run)
    assert list(run.path.iterdir()) == []
    assert load_secret(run).text_key("x") == load_secret(run).text_key("x")


def test_a_file_system_without_links_keeps_a_secret_too(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert load_secret(run).text_key("x") == load_secret(run).text_key("x")
    assert [each.name for each in run.path.iterdir()] == [run.secret.name]


def test_every_purpose_has_its_own_key_and_no_key_tells_the_secret(run: RunDir) -> None:
    secret, text = load_secret(run), run.secret.read_text().strip()
    keys = {secret.text_key(purpose) for purpose in ("control", "rollouts", "inference.api_key")}
    assert len(keys) == 3 and all(len(key) == 64 for key in keys)
    assert not any(text in shown for shown in (*keys, repr(secret), str(secret)))


def test_two_runs_have_two_secrets_and_a_run_that_goes_on_keeps_its_own(tmp_path: Path, run: RunDir) -> None:
    other = load_secret(RunDir(tmp_path / "other")).text_key("x")
    assert load_secret(run).text_key("x") != other
    assert load_secret(RunDir(tmp_path / "other")).text_key("x") == other


def test_the_environment_variable_goes_before_the_file(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VAR, GIVEN)
    assert load_secret(run).key("x") == Secret(GIVEN).key("x") == find_secret(run, 0).key("x")
    assert not run.secret.exists()
    assert without_secret() == {SECRET_VAR: ""}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_secret_that_others_can_read_is_refused(run: RunDir, mode: int) -> None:
    load_secret(run)
    run.secret.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode 0{mode:o}.*chmod 600"):
        load_secret(run)


def test_a_short_secret_is_refused_and_not_repeated(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VAR, "hunter2")
    with pytest.raises(ConfigError, match=f"{SECRET_VAR} has 7 characters.*{MIN_CHARS}") as error:
        load_secret(run)
    assert "hunter2" not in str(error.value)


def test_a_node_waits_for_the_secret_of_the_first_and_says_what_it_misses(run: RunDir) -> None:
    with pytest.raises(ConfigError, match=f"{run.secret}.*{SECRET_VAR}"):
        find_secret(run, 0.1)
    first = threading.Timer(0.2, load_secret, [run])
    first.start()
    assert find_secret(run, 10).key("x") == load_secret(run).key("x")
    first.join()


def test_a_new_run_and_a_clean_one_keep_the_secret_that_others_may_have_read(run: RunDir) -> None:
    before = load_secret(run).key("x")
    rundir.claim(run, resume=False, step=None, clean=False).close()
    (run.path / "ledger.sqlite").touch()
    rundir.claim(run, resume=False, step=None, clean=True).close()
    assert not run.ledger.exists() and load_secret(run).key("x") == before


NODES = (
    'model.name = "m"\nmax_steps = 1\noutput_dir = "{}"\n[deployment]\ntype = "multi_node"\n'
    'hosts = ["10.0.0.1", "10.0.0.2"]\nnum_train_nodes = 1\nnum_infer_replicas = 1\ngpus_per_node = 0\n'
    '[inference]\ndevice = "cpu"\n[weight_broadcast]\ntype = "filesystem"\n'
    '[[orchestrator.env]]\nid = "sort-letters"\n'
)


def test_engines_of_several_nodes_ask_for_a_key_that_every_node_makes_alike(tmp_path: Path, run: RunDir) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(NODES.format(tmp_path))
    cfg = load(RLConfig, ["@", str(path)])
    secret = Secret(GIVEN)
    first, second = (plan_nodes(cfg, run, secret=secret) for _ in range(2))
    key = secret.text_key("inference.api_key")
    for plan in (first, second):
        env = {spec.role: spec.env for spec in plan.processes}
        assert env["orchestrator"][cfg.orchestrator.client.api_key_var] == env["inference"]["VLLM_API_KEY"] == key
        assert not any(key in word for spec in plan.processes for word in spec.argv)
    planning.write(first, run.path)
    assert not [path for path in run.path.rglob("*.json") if key in path.read_text()]
    shown = table(first) + json.dumps(planning.as_json(first))
    assert key not in shown and GIVEN not in shown and "made from the run's secret" in shown


def test_a_key_that_is_given_stays(tmp_path: Path, run: RunDir) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(NODES.format(tmp_path) + "\n")
    cfg = load(RLConfig, ["@", str(path), "--inference.api-key", "mine"])
    plan = plan_nodes(cfg, run, secret=Secret(GIVEN))
    assert plan.config.inference is not None and plan.config.inference.api_key == "mine"
    assert plan_nodes(load(RLConfig, ["@", str(path)]), run).config.inference.api_key is None  # a dry run
    planning.write(plan, run.path)
    holding = [each for each in run.path.rglob("*.json") if '"mine"' in each.read_text()]
    assert holding and all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in holding)
    # what trackers are given
    assert '"mine"' not in json.dumps(masked(json.loads(run.config("run").read_text())))


def test_a_key_of_the_environment_goes_before_the_one_that_is_made(
    tmp_path: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(NODES.format(tmp_path))
    cfg = load(RLConfig, ["@", str(path), "--orchestrator.client.api-key-var", "OURS"])
    monkeypatch.setenv("OURS", "by-hand")
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    plan = plan_nodes(cfg, run, secret=Secret(GIVEN))
    env = {spec.role: spec.env for spec in plan.processes}
    assert plan.config.inference is not None and plan.config.inference.api_key is None
    assert env["inference"]["VLLM_API_KEY"] == env["orchestrator"]["OURS"] == "by-hand"
    planning.write(plan, run.path)
    assert not [path for path in run.path.rglob("*.json") if "by-hand" in path.read_text()]
    assert "that of OURS: it must be set on every node" in table(plan)
    monkeypatch.delenv("OURS")
    made = plan_nodes(cfg, run, secret=Secret(GIVEN))
    env = {spec.role: spec.env for spec in made.processes}
    key = Secret(GIVEN).text_key("inference.api_key")
    assert env["inference"]["VLLM_API_KEY"] == env["orchestrator"]["OURS"] == key
