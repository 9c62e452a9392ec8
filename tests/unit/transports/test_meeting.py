"""transports/meeting.py: an orchestrator and a trainer that were started alone find each other by the run directory."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port

from stretto import dry_run
from stretto.base.errors import EngineError
from stretto.base.ports import PortClaims, own_addresses
from stretto.config.load import load
from stretto.config.root import OrchestratorConfig, TrainerConfig
from stretto.config.sections.transport import ControlSection
from stretto.transports import meeting
from stretto.transports.meeting import announce, at_all_addresses, moved_ports, with_orchestrator


@pytest.fixture(autouse=True)
def started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRETTO_STATUS_FD", "STRETTO_SUPERVISED", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def orchestrator(tmp_path: Path):
    def build(*words: str) -> OrchestratorConfig:
        given = ["--output-dir", str(tmp_path), "--run.name", "run", "--env.0.id", "sort-letters", "--max-steps", "1"]
        cfg = load(OrchestratorConfig, [*given, *words])
        cfg.run_dir.path.mkdir(exist_ok=True)
        return cfg

    return build


@pytest.fixture
def opened():
    claims = PortClaims("test-of-meetings")
    yield lambda cfg: at_all_addresses(cfg, claims)
    claims.close()


@pytest.fixture
def trainer(tmp_path: Path):
    def build(*words: str) -> TrainerConfig:
        return load(TrainerConfig, ["--output-dir", str(tmp_path), "--run.name", "run", "--max-steps", "1", *words])

    return build


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_a_trainer_finds_host_and_ports_that_no_one_typed(orchestrator, opened, trainer, listener: int) -> None:
    cfg = opened(orchestrator("--control.port", str(listener), "--rollout-transport.port", "6001"))
    assert (cfg.control.host, cfg.rollout_transport.host) == ("0.0.0.0", "0.0.0.0")
    remove = announce(cfg)
    found = with_orchestrator(trainer(), lambda: False)
    address = (*own_addresses(), "127.0.0.1")[0]
    assert (found.control.host, found.control.port) == (address, listener)
    assert (found.rollout_transport.host, found.rollout_transport.port) == (address, 6001)
    assert found.weight_broadcast.type == "shm"  # all of it is on this machine
    remove()
    assert not cfg.run_dir.orchestrator.exists()


def test_a_default_port_that_is_taken_is_moved_where_the_file_says_so(orchestrator, opened, listener: int) -> None:
    given = orchestrator()
    given = given.model_copy(update={"control": ControlSection.model_construct(set(), port=listener)})
    cfg = opened(given)
    assert cfg.control.port > listener
    assert (
        moved_ports(given, cfg)[0] == f"control.port is {cfg.control.port}, since {listener} is taken on this machine"
    )
    typed = orchestrator("--control.port", str(listener))
    assert opened(typed).control.port == listener
    assert f"NOT READY: control.port = {listener} is taken" in dry_run.listens(typed)
    hosts = orchestrator("--control.host", "127.0.0.1")  # its trainers are given the port
    assert moved_ports(hosts, opened(hosts)) == []


def test_the_file_holds_no_secret_and_only_its_user_reads_it(orchestrator, opened) -> None:
    cfg = opened(orchestrator("--client.base-url", "http://user:word@10.1.1.1:8000/v1"))
    announce(cfg)
    path = cfg.run_dir.orchestrator
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["engines"] == ["10.1.1.1"] and "word" not in path.read_text()


def test_addresses_that_are_typed_are_kept(orchestrator, opened, trainer) -> None:
    typed = orchestrator("--control.host", "127.0.0.1", "--rollout-transport.host", "127.0.0.1")
    assert opened(typed) == typed
    cfg = trainer("--control.host", "10.9.9.9")
    assert with_orchestrator(cfg, lambda: False) is cfg


def test_with_an_engine_on_another_machine_weights_are_files(orchestrator, opened, trainer, listener: int) -> None:
    announce(opened(orchestrator("--control.port", str(listener), "--client.base-url", "http://192.0.2.7:8000")))
    assert with_orchestrator(trainer(), lambda: False).weight_broadcast.type == "filesystem"
    typed = trainer("--weight-broadcast.type", "collective")
    assert with_orchestrator(typed, lambda: False).weight_broadcast.type == "collective"


def test_a_network_that_every_machine_has_is_not_the_orchestrators(
    orchestrator, opened, trainer, listener: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(opened(orchestrator("--control.port", str(listener))))
    monkeypatch.setattr(meeting.socket, "gethostname", lambda: "elsewhere")
    tried: list[str] = []
    monkeypatch.setattr(meeting, "_answers", lambda host, port: tried.append(host) or host not in own_addresses())
    found = with_orchestrator(trainer(), lambda: False)
    assert not set(tried) & {*own_addresses(), "127.0.0.1"}
    assert found.control.host == tried[-1] and found.weight_broadcast.type == "filesystem"


@pytest.mark.heavy
def test_a_trainer_waits_for_its_orchestrator_and_says_what_is_missing(
    trainer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(EngineError, match="no orchestrator was found"):
        with_orchestrator(
            trainer("--control.register-timeout-s", "0.3", "--control.port", str(free_port())), lambda: False
        )
    assert "waiting for an orchestrator" in caplog.text


@pytest.mark.heavy
def test_what_answers_at_the_default_port_is_not_taken_for_the_orchestrator_of_this_run(
    trainer, monkeypatch: pytest.MonkeyPatch, listener: int
) -> None:
    monkeypatch.setattr(meeting, "_answers", lambda host, port: True)
    with pytest.raises(EngineError, match="no orchestrator was found"):
        with_orchestrator(trainer("--control.register-timeout-s", "0.3"), lambda: False)
    typed = with_orchestrator(trainer("--control.port", str(listener)), lambda: False)
    assert (typed.control.host, typed.control.port) == ("127.0.0.1", listener)


@pytest.mark.heavy
def test_a_file_of_an_orchestrator_that_is_gone_is_named(orchestrator, opened, trainer) -> None:
    announce(opened(orchestrator("--control.port", str(free_port()))))
    with pytest.raises(EngineError, match="did not answer"):
        with_orchestrator(trainer("--control.register-timeout-s", "0.3"), lambda: False)


def test_the_next_orchestrators_file_stays(orchestrator, opened) -> None:
    remove = announce(opened(orchestrator("--control.port", "6101")))
    second = opened(orchestrator("--control.port", "6102"))
    announce(second)
    remove()
    assert json.loads(second.run_dir.orchestrator.read_text())["control_port"] == 6102
