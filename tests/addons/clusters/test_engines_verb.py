"""`stretto engines`: what is refused, and what the ledger answers; tests/e2e/test_engines.py asks a run."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.ledger import Ledger
from stretto_clusters import engines as verb
from stretto_clusters.engines import END_S, _wish, engines

URL = "http://gpu7:8000"


def fleet(**states: str) -> dict[str, Any]:
    return {"engines": {f"http://{host}:8000": {"state": state, "reason": ""} for host, state in states.items()}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    ledger = Ledger(run)
    ledger.run_started({})
    ledger.event("fleet", fleet(gpu1="ready") | {"refused": {}})
    ledger.close()
    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "RUN"], "give the address of an engine"),
        (["add", "RUN", "gpu7:8000"], "'gpu7:8000' is no address of an engine; write it as http://gpu7:8000"),
        (["add", "RUN", "http://gpu7:port"], "is no address"),
        (["add", "RUN", "http://gpu7:8000/a?b=1"], "is no address"),
        (["drain", "RUN", URL], "http://gpu7:8000 is no engine of .*; it has http://gpu1:8000"),
        (["drain", "RUN", "http://gpu1:8000", "--wait", "-1"], "--wait -1: give 0 or more"),
        (["list", "RUN", URL], "list RUN takes no addresses"),
        (["start", "RUN", URL], "start RUN takes no addresses"),
        (["start", "RUN"], "has not started engines itself"),
        (["add", "RUN", URL, "--wayt", "1"], "did you mean --wait"),
        (["grow", "RUN", URL], "add, drain, remove"),
        (["--hlp"], "--hlp: unknown flag; did you mean --help"),
        ([], "a word is missing: what .list; add: it joins; drain: .*URL .addresses"),
        (["RUN", "list"], "list comes first: stretto engines list "),
    ],
)
def test_what_cannot_be_asked_is_refused_and_nothing_is_written(run: RunDir, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engines([str(run) if word == "RUN" else word for word in words])
    assert not run.engines.exists()


def test_a_run_without_a_ledger_has_no_engines(tmp_path: Path) -> None:
    RunDir(tmp_path).configs.mkdir()
    with pytest.raises(ConfigError, match="not a run of `rl`"):
        engines(["list", str(tmp_path)])


def test_a_run_that_is_done_has_no_engines(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.config("run").write_text(json.dumps({"max_steps": 3}))
    run.summary.write_text(json.dumps({"steps": 3}))
    with pytest.raises(ConfigError, match=r"is done: engines join and leave a run while it goes on.*--resume"):
        engines(["add", str(run), URL])
    with pytest.raises(ConfigError, match="is no address"):  # found first: it is wrong in any case
        engines(["add", str(run), "gpu7:8000"])
    assert engines(["list", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run} is done; when it ended:\nhttp://gpu1:8000  ready")


def test_a_wish_that_is_refused_is_taken_back(run: RunDir) -> None:
    wish = {"url": "http://gpu1:8000", "state": "on", "wait_s": 1.0, "asked_at": 0.0}
    run.engines.mkdir()
    path = run.engines / "http%3A%2F%2Fgpu1%3A8000.json"
    path.write_text(json.dumps(wish))

    def answer() -> None:
        while json.loads(path.read_text()) == wish:
            time.sleep(0.01)
        ledger = Ledger(run)
        ledger.event("fleet", fleet(gpu1="ready") | {"refused": {wish["url"]: "no"}})
        ledger.close()

    thread = threading.Thread(target=answer)
    thread.start()
    assert engines(["remove", str(run), "http://gpu1:8000", "--timeout", "30"]) == 1
    thread.join()
    assert json.loads(path.read_text()) == wish


@pytest.mark.heavy
def test_an_engine_that_does_not_answer_is_told_with_what_becomes_of_the_wish(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer() -> None:
        while not run.engines.exists() or not list(run.engines.glob("*.json")):
            time.sleep(0.01)
        ledger = Ledger(run)
        known = fleet(gpu1="ready", gpu7="down")
        known["engines"][URL]["reason"] = "cannot connect: connection refused"
        ledger.event("fleet", known | {"refused": {}})
        ledger.close()

    thread = threading.Thread(target=answer)
    thread.start()
    assert engines(["add", str(run), URL, "--timeout", "2"]) == 1
    thread.join()
    said = capsys.readouterr()
    assert "cannot connect: connection refused" in said.out
    assert "the wish stays, and `stretto engines remove` takes it back" in said.err


def test_a_run_that_does_not_answer_is_told(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert engines(["add", str(run), URL, "--timeout", "0.2"]) == 1
    assert "stretto status" in capsys.readouterr().err
    [wish] = [json.loads(path.read_text()) for path in run.engines.iterdir()]
    assert (wish["url"], wish["state"]) == (URL, "on")


@pytest.mark.parametrize(
    ("what", "then", "refused", "code"),
    [("add", {"gpu1": "ready", "gpu7": "ready"}, {}, 0), ("remove", {}, {}, 0), ("drain", {"gpu1": "ready"}, "no", 1)],
)
def test_the_answer_is_what_the_ledger_says(
    run: RunDir, capsys: pytest.CaptureFixture[str], what: str, then: dict[str, str], refused: Any, code: int
) -> None:
    url = URL if what == "add" else "http://gpu1:8000"

    def answer() -> None:
        while not run.engines.exists() or not list(run.engines.glob("*.json")):
            time.sleep(0.01)
        ledger = Ledger(run)
        ledger.event("fleet", fleet(**then) | {"refused": {url: refused} if refused else {}})
        ledger.close()

    thread = threading.Thread(target=answer)
    thread.start()
    assert engines([what, str(run), url, "--timeout", "30"]) == code
    thread.join()
    out, err = capsys.readouterr()
    assert (url in out) == (code == 0) and (f"{url}: no" in err) == (code == 1)


def test_an_engine_that_is_removed_already_is_removed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(run)
    ledger.event("fleet", fleet(gpu1="ready"))
    ledger.close()
    with pytest.raises(ConfigError, match="is no engine of"):
        engines(["remove", str(run), URL])
    _wish(run, "removed", [URL], 0.0)
    assert engines(["remove", str(run), URL, "--timeout", "30"]) == 0
    assert capsys.readouterr().out == f"{URL}: removed\n"


def test_start_ends_when_its_engine_is_removed_by_another_command(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.config("inference").write_text("{}")
    spec = {"role": "inference", "argv": ["x", str(run.config("inference"))]}
    run.plan.write_text(json.dumps({"processes": [spec]}))
    start = process.start
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(process, "start", lambda name, argv, **how: start(name, sleeps, **how))
    monkeypatch.setattr(verb, "_is_up", lambda url: True)
    monkeypatch.setattr(verb, "RUN_S", 0.05)

    def remove() -> None:  # as `stretto engines remove` and the run do
        while not run.engines.exists() or not (files := list(run.engines.glob("*.json"))):
            time.sleep(0.01)
        _wish(run, "removed", [json.loads(files[0].read_text())["url"]], 0.0)

    threading.Thread(target=remove).start()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert engines(["start", str(run), "--host", "gpu7", "--port", "8000", "--wait", "0"]) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert f"{URL}: it was removed from the run\n" in capsys.readouterr().out


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "[::1]", socket.gethostname()])
def test_every_name_of_this_machine_is_one_engine(run: RunDir, capsys: pytest.CaptureFixture[str], host: str) -> None:
    ledger = Ledger(run)
    node = {"state": "ready", "reason": ""}
    ledger.event("fleet", {"engines": {"http://127.0.0.1:8000": node}, "refused": {}})
    ledger.close()
    assert engines(["add", str(run), f"http://{host}:8000", "http://127.0.0.1:8000", "--timeout", "30"]) == 0
    assert capsys.readouterr().out == "http://127.0.0.1:8000: ready\n"
    [wish] = [json.loads(path.read_text()) for path in run.engines.iterdir()]
    assert wish["url"] == "http://127.0.0.1:8000"
    with pytest.raises(ConfigError, match="is no engine of"):
        engines(["drain", str(run), "http://127.0.0.2:8000"])
    with pytest.raises(ConfigError, match="is no engine of"):
        engines(["drain", str(run), f"http://{host}:8001"])


def test_the_manifest_of_engines_in_pods_says_what_the_verb_and_the_chart_know(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    deploy = Path(__file__).parents[3] / "deploy"
    manifest = yaml.safe_load((deploy / "kubernetes" / "engines.yaml").read_text())
    pod = manifest["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert manifest["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    program, verb, what, run, *_ = container["command"]
    assert (program, verb, what) == ("stretto", "engines", "start")
    with pytest.raises(ConfigError, match="there is no such directory"):  # its words are read before
        engines([what, str(tmp_path / run.strip("/")), *container["args"]])
    wait_s = float(container["args"][container["args"].index("--wait") + 1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > wait_s + END_S
    chart = "".join(path.read_text() for path in sorted((deploy / "helm" / "stretto" / "templates").iterdir()))
    assert '"%s-run-secret" .Release.Name' in chart and '"%s-shared-data" .Release.Name' in chart
    names = {each["name"]: each["valueFrom"] for each in container["env"]}
    assert names["VLLM_API_KEY"] == {"secretKeyRef": {"name": "my-exp-run-secret", "key": "secret"}}
    assert pod["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "my-exp-shared-data"}
    assert run.startswith(f"{container['volumeMounts'][0]['mountPath']}/outputs/")


@pytest.mark.parametrize("urls", [["http://127.0.0.1:7", "http://localhost:7"], ["http://localhost:7"]])
def test_an_engine_that_has_joined_by_another_name_has_joined(run: RunDir, urls: list[str]) -> None:
    def answer() -> None:
        while not run.engines.exists() or not list(run.engines.glob("*.json")):
            time.sleep(0.01)
        ledger = Ledger(run)
        ledger.event("fleet", {"engines": {"http://127.0.0.1:7": {"state": "ready", "reason": ""}}, "refused": {}})
        ledger.close()

    thread = threading.Thread(target=answer)
    thread.start()
    assert engines(["add", str(run), *urls, "--timeout", "10"]) == 0
    thread.join()
    assert len(list(run.engines.iterdir())) == 1
