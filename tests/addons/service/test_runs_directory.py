"""A watched directory registers, evicts and ends runs by its files, through the functions of the routes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from stretto.base.errors import ConfigError
from stretto.config.load import load
from stretto_service.config import ServeConfig
from stretto_service.hub import Hub
from stretto_service.main import build, runs_directories
from stretto_service.store import Run


class Watched:
    """A hub that watches a directory; a look is made when a test says so."""

    def __init__(self, root: Path, **service: object) -> None:
        self.runs, self.model = root / "runs", root / "model"
        self.model.mkdir(exist_ok=True)
        (self.model / "config.json").write_text(json.dumps({"vocab_size": 100}))
        section = {"users": {"alice": {}, "bob": {}}, "runs_dir": str(self.runs), "runs_user": "alice"}
        section |= {"engine_urls": ["http://127.0.0.1:1"], "max_lora_rank": 8}
        data = {"output_dir": str(root), "seq_len": 64, "model": {"name": str(self.model)}}
        self.cfg = ServeConfig.model_validate(data | {"service": section | service})

    @asynccontextmanager
    async def hub(self) -> AsyncIterator[Hub]:
        hub, self.app = build(self.cfg)
        (self.watcher,) = runs_directories(hub)
        try:
            yield hub
        finally:
            await hub.close()

    @property
    def look(self):
        return self.watcher.look

    def text(self, rank: int = 4, seq_len: int = 32, more: str = "") -> str:
        return (
            f'seq_len = {seq_len}\n{more}\n[model]\nname = "{self.model}"\n[model.lora]\nrank = {rank}\n'
            '[[orchestrator.env]]\nid = "reverse-text"\n'
        )

    def control(self, name: str) -> Path:
        found = self.runs / name / "control"
        found.mkdir(parents=True, exist_ok=True)
        return found

    def write(self, name: str, text: str | bytes | None = None) -> Path:
        """Write the file of a run; its control directory."""
        control, own = self.control(name), self.text() if text is None else text
        (control / "orch.toml").write_bytes(own.encode() if isinstance(own, str) else own)
        return control


def status(control: Path) -> dict:
    return json.loads((control / "status.json").read_text())


def error(control: Path) -> str:
    return (control / "config_validation_error.txt").read_text()


def later(path: Path) -> None:
    """As if the file had been written again, a minute after this."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 60 * 10**9))


async def test_a_file_registers_a_run_and_its_orchestrator_takes_it_over(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    async with place.hub() as hub:
        await place.look()  # there is no directory yet
        control = place.write("run_a")
        place.write("other")
        for _ in range(2):
            await place.look()
        (run,) = hub.store.all(Run)
        assert (run.id, run.owner, run.spec.rank, run.state) == ("alice:run_a", "alice", 4, "creating")
        assert status(control) == {"id": "alice:run_a", "state": "creating", "reason": "", "step": 0}
        assert not (control / "config_validation_error.txt").exists()

        token = json.loads((place.cfg.run_dir.path / "tokens.json").read_text())
        async with TestClient(TestServer(place.app)) as client:

            async def post(path: str, user: str = "alice", **body: object) -> tuple[int, dict]:
                data = body | {"base_model": str(place.model)}
                async with client.post(path, json=data, headers={"X-API-Key": token[user]}) as response:
                    return response.status, await response.json()

            spec = msgspec.to_builtins(place.watcher._requests["run_a"][1].spec)
            found = await post("/v1/runs", spec=spec | {"rank": 5})
            assert found[0] == 409 and "another rank" in found[1]["detail"]
            found = await post("/runs/check", spec=spec, seq_len=32)
            assert found == (200, {"user": "alice", "model": str(place.model), "state": "creating"})
            assert (await post("/v1/runs", spec=spec))[1] == {"id": run.id, "request_id": f"{run.id}/0"}
            found = await post("/runs/check", spec=spec, seq_len=32)
            assert found[0] == 409 and "already" in found[1]["detail"]
        assert len(list(hub.store.all(Run))) == 1


WRONG = {
    "no TOML": ("seq_len = = 3\n", "orch.toml"),
    "no text": (b"\xff\xfe\x00", "orch.toml"),
    "an unknown key": ("more:sek_len = 3", "sek_len"),
    "no adapter": ("bare", "model.lora"),
    "a rank over the service's": ("rank:9", "rank = 9 must be 1 to 8 (service.max_lora_rank)"),
    "rows over the service's": ("seq_len:65", "seq_len = 65 must be at most 64"),
    "another model": ("model", "is not served here"),
    "another name": ('more:run.name = "mine"', 'write name = "run_a"'),
    "too large": (b"#" * (2 << 20), "has more than 1 MiB"),
    "what a service does not have": ("more:trainer.updates_per_step = 2", "updates_per_step"),
}


def content(place: Watched, what: str | bytes) -> str | bytes:
    if isinstance(what, bytes) or ("=" in what and ":" not in what):
        return what
    kind, _, value = what.partition(":")
    match kind:
        case "more":
            return place.text(more=value)
        case "rank" | "seq_len":
            return place.text(**{kind: int(value)})
        case "bare":
            return place.text().replace("[model.lora]\nrank = 4\n", "")
    return place.text().replace(str(place.model), "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_file_has_one_message_and_the_others_never_notice(case: str, tmp_path: Path) -> None:
    what, say = WRONG[case]
    place = Watched(tmp_path)
    control, right = place.write("run_a", content(place, what)), place.write("run_b")
    async with place.hub() as hub:
        await place.look()
        assert [run.id for run in hub.store.all(Run)] == ["alice:run_b"] and status(right)["state"]
        message = error(control)
        assert say in message and "orch.toml" in message and "Traceback" not in message, message
        assert not (control / "status.json").exists()
        written = (control / "config_validation_error.txt").stat().st_mtime_ns
        await place.look()
        assert (control / "config_validation_error.txt").stat().st_mtime_ns == written, "written once"
        later(place.write("run_a") / "orch.toml")
        await place.look()
        assert not (control / "config_validation_error.txt").exists()
        assert status(control)["state"] == "creating"


async def test_a_run_without_a_place_gets_one_when_there_is_one(tmp_path: Path) -> None:
    place = Watched(tmp_path, max_concurrent_runs=1)
    first, second = place.write("run_a"), place.write("run_b")
    async with place.hub() as hub:
        await place.look()
        assert status(first)["state"] == "creating" and "all 1 places" in error(second)
        (first / "orch.toml").unlink()
        for _ in range(2):  # the run is ended after the others were looked at
            await place.look()
        assert [run.state for run in hub.store.all(Run)] == ["ended", "creating"]
        assert not (second / "config_validation_error.txt").exists()


async def test_an_eviction_file_holds_a_run_until_it_is_removed(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    control = place.write("run_a")
    async with place.hub() as hub:
        await place.look()
        (run,) = hub.store.all(Run)
        (control / "evicted.txt").write_text("the cluster\nis needed elsewhere\n")
        for _ in range(2):
            await place.look()
        reason = "control/evicted.txt: the cluster is needed elsewhere"
        assert run.is_held and status(control) == status(control) | {"state": "frozen", "reason": reason}
        saves = [request.payload.kind for request in hub.training.queue.requests(run.id)]
        assert saves.count("save_state") == 1, "it is saved once, and gives its place back then"
        (control / "evicted.txt").unlink()
        await place.look()
        assert not run.is_held and status(control)["state"] == "active"
        hub.training.freeze(run, "the admin has frozen it", by_admin=True)
        await place.look()
        assert (control / "evicted.txt").read_text() == "frozen at the service: the admin has frozen it\n"
        (control / "evicted.txt").unlink()
        await place.look()
        assert run.is_held, "only the admin resumes it"
        hub.training.resume(run, by_admin=True)
        await place.look()
        assert not run.is_held and not (control / "evicted.txt").exists()


async def test_what_the_admin_freezes_stays_so_whatever_the_file_had_said(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    control = place.write("run_a")
    async with place.hub() as hub:
        await place.look()
        (run,) = hub.store.all(Run)
        (control / "evicted.txt").write_text("away\n")
        await place.look()
        hub.training.freeze(run, "the admin has frozen it", by_admin=True)
        (control / "evicted.txt").unlink()
        await place.look()
        assert run.is_held and run.reason == "the admin has frozen it"


async def test_what_is_no_plain_directory_or_file_is_left_alone(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    right, elsewhere = place.write("run_b"), tmp_path / "elsewhere"
    shutil.copytree(right.parent, elsewhere)
    (place.runs / "run_link").symlink_to(elsewhere)
    (place.runs / "run_a_link_that_cannot_be_followed").symlink_to("x" * 300)
    (place.runs / "run_link_within").mkdir()
    (place.runs / "run_link_within" / "control").symlink_to(elsewhere / "control")
    (place.control("run_link_file") / "orch.toml").symlink_to(elsewhere / "control" / "orch.toml")
    os.mkfifo(place.control("run_pipe") / "orch.toml")
    os.mkfifo(place.control("run_pipe") / "evicted.txt")
    os.makedirs(os.fsencode(place.runs) + b"/run_\xff/control")
    Path(os.fsdecode(os.fsencode(place.runs) + b"/run_\xff/control/orch.toml")).write_text(place.text())
    async with place.hub() as hub:
        await place.look()
        assert [run.id for run in hub.store.all(Run)] == ["alice:run_b"]
        assert sorted(path.name for path in (elsewhere / "control").iterdir()) == ["orch.toml"]


async def test_a_directory_that_is_away_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Watched(tmp_path)
    place.write("run_a")
    async with place.hub() as hub:
        await place.look()
        (run,) = hub.store.all(Run)
        place.runs.rename(tmp_path / "away")
        await place.look()
        assert run.state == "creating"
        (tmp_path / "away").rename(place.runs)

        def stale(_: Path) -> None:
            raise OSError(116, "Stale file handle")

        with monkeypatch.context() as context:
            context.setattr("stretto_service.runs.directory._file", stale)
            await place.look()
        assert run.state == "creating"


async def test_a_fault_in_one_place_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Watched(tmp_path)
    place.write("run_a")
    place.write("run_b")
    async with place.hub() as hub:
        read = place.watcher._read

        async def broken(found: object, stamp: object) -> object:
            if found.name == "run_a":
                raise KeyError("lora")
            return await read(found, stamp)

        monkeypatch.setattr(place.watcher, "_read", broken)
        await place.look()
        assert [run.id for run in hub.store.all(Run)] == ["alice:run_b"]


async def test_a_directory_that_goes_ends_its_run_and_what_has_ended_stays_so(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    control, gone = place.write("run_a"), place.write("run_b")
    async with place.hub() as hub:
        await place.look()
        hub.training.end(hub.store.get(Run, "alice:run_a"))
        shutil.rmtree(gone.parent)
        await place.look()
        assert [run.state for run in hub.store.all(Run)] == ["ended", "ended"]
    async with place.hub() as hub:  # another hub of the same service
        await place.look()
        assert hub.store.get(Run, "alice:run_a").state == "ended" == status(control)["state"]
        later(control / "orch.toml")
        await place.look()
        assert hub.store.get(Run, "alice:run_a").state == "creating", "a file that was written anew"


async def test_a_name_that_a_request_has_taken_stays_with_it(tmp_path: Path) -> None:
    place = Watched(tmp_path)
    control = place.write("run_a")
    async with place.hub() as hub:
        await place.look()
        run = hub.store.get(Run, "alice:run_a")
        run.directory, run.is_prepared = None, False
        await place.look()
        assert "you have a run 'run_a' already" in error(control)
        shutil.rmtree(control.parent)
        await place.look()
        assert run.state == "creating", "not ended with a directory that is not its own"


@pytest.mark.parametrize(
    ("words", "say"),
    [
        (["--service.users.a", "{}", "--service.users.b", "{}"], "several"),
        (["--service.runs-user", "carol"], "is no user of this service"),
    ],
)
def test_whose_runs_they_are_must_be_known(words: list[str], say: str) -> None:
    with pytest.raises(ConfigError, match=say):
        load(ServeConfig, ["--service.runs-dir", "runs", *words])
