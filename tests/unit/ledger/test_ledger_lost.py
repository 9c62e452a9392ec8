"""A power cut removes the end of a ledger: the run continues, and trains no trained group again."""

import asyncio
import os
import random
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

from stretto.base.errors import ConfigError, DataError, EngineError
from stretto.base.paths import RunDir
from stretto.config.root import OrchestratorConfig
from stretto.ledger import Ledger, schema
from stretto.ledger.audit import audit

pytestmark = pytest.mark.heavy

SAVED, DIED, LAST = 8, 9, 12
NUM_CUTS = 20


class CopyingTrainer(FakeTrainer):
    """Copies the run directory when the run dies, while the ledger's rows are still in the WAL."""

    def __init__(self, run: Path, copy: Path) -> None:
        super().__init__(max_steps=LAST, checkpoint_every=2, die_after=DIED, step_delay=lambda step: 1.0)
        self.run, self.copy = run, copy

    async def _train(self) -> None:
        await super()._train()
        shutil.copytree(self.run, self.copy)


@pytest.fixture(scope="module", params=[0, 1])
def died(request, tmp_path_factory) -> tuple[OrchestratorConfig, Path]:
    """A run that died after step 9, with a checkpoint of step 8: its config, and a copy of its directory."""
    directory = tmp_path_factory.mktemp("died")
    cfg = config(directory, max_steps=LAST, max_async_level=request.param)
    rng = random.Random(3)
    engine = FakeEngine(parrot(0.4), delay=lambda request: rng.random())
    with pytest.raises(EngineError, match="killed"):
        train(cfg, engine, CopyingTrainer(cfg.run_dir.path, directory / "copy"))
    return cfg, directory / "copy"


def trained_up_to(ledger: Path, step: int) -> set[int]:
    """The draws in batches up to `step`, read from the tables."""
    db = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    query = (
        "SELECT DISTINCT r.group_id FROM rollouts r JOIN batch_rollouts b ON b.row = r.row "
        "JOIN batches s ON s.batch = b.batch WHERE s.step <= ? AND s.state != 'undone'"
    )
    found = {group for (group,) in db.execute(query, (step,))}
    db.close()
    return found


def resume(cfg: OrchestratorConfig, directory: Path, step: int = SAVED) -> list[set[int]]:
    """Resume in a copy of the run; the draws that each step trained."""
    (directory / "run").parent.mkdir(exist_ok=True)
    settings = cfg.model_dump() | {
        "resume": {"step": step}, "output_dir": directory, "run": {"name": "run"}
    }  # fmt: skip
    engine = FakeEngine(parrot(0.4))
    engine.version = step
    trainer = FakeTrainer(max_steps=LAST, start=step, checkpoint_every=2)
    loop = train(OrchestratorConfig.model_validate(settings), engine, trainer)
    assert loop.progress.step == LAST
    samples = [[s for batch in each for m in batch.micro_batches for s in m.sample_ids] for each in trainer.batches]
    assert [len(set(each)) for each in samples] == [8] * (LAST - step)
    return [{int(name.split(".")[0].removeprefix("g")) for name in each} for each in samples]


def check(died, directory: Path) -> list[str]:
    """Resume, and compare with the undamaged ledger; the findings of the audit."""
    cfg, copy = died
    before = trained_up_to(copy / "ledger.sqlite", SAVED)
    assert len(before) == 2 * SAVED
    after = resume(cfg, directory)
    assert not before & set().union(*after), "trained again"
    assert sum(map(len, after)) == len(set().union(*after)) == 2 * (LAST - SAVED)
    return audit(RunDir(directory / "run"))


def test_wherever_the_wal_is_cut_no_draw_is_trained_again(died, tmp_path, caplog):
    num_lost = 0
    for cut in range(NUM_CUTS + 1):
        run = RunDir(tmp_path / str(cut) / "run")
        shutil.copytree(died[1], run.path)
        wal = Path(f"{run.ledger}-wal")
        assert wal.stat().st_size > 100_000
        with wal.open("r+b") as file:
            file.truncate(wal.stat().st_size * cut // NUM_CUTS)
        Path(f"{run.ledger}-shm").unlink(missing_ok=True)
        caplog.clear()
        lines = check(died, run.path.parent)
        warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
        about_ledger = [text for text in warned if "ledger.sqlite" in text]
        if lines:
            assert len(lines) == 1 and "the end of the ledger was lost" in lines[0], lines
            assert len(about_ledger) == 1 and "count as trained" in about_ledger[0]
            num_lost += 1
    assert 8 <= num_lost < NUM_CUTS and lines == [] and about_ledger == []


@pytest.mark.parametrize("lost", ["ledger.sqlite*", "ledger.sqlite-*"])
def test_a_run_continues_without_its_ledger(died, tmp_path, lost, caplog):
    run = RunDir(tmp_path / "run")
    shutil.copytree(died[1], run.path)
    for path in run.path.glob(lost):
        path.unlink()
    assert check(died, tmp_path) == []
    assert "is missing: continues without it from step 8; draws up to it count as trained" in caplog.text
    assert resume(died[0], tmp_path, 10)  # and its own checkpoints are good


def test_cut_payloads_are_generated_again(died, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(died[1], run.path)
    segment = run.segment(0)
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size * 3 // 4)
    check(died, tmp_path)


def test_the_audit_is_empty_again_after_a_power_cut_that_was_handled(died, tmp_path):
    """The cut takes all payloads that no checkpoint has flushed."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(died[1], run.path)
    with schema.open_for_reading(run.ledger) as db:
        end = schema.scalar(db, "SELECT max(offset + length) FROM live_rollouts WHERE step <= ?", SAVED)
        num_cut = schema.scalar(db, "SELECT count(*) FROM rollouts WHERE offset >= ?", end)
    db.close()
    os.truncate(run.segment(0), end)
    assert len(audit(run)) == num_cut >= 8
    assert check(died, tmp_path) == []


def test_resuming_from_an_earlier_checkpoint_after_a_loss_trains_nothing_again(died, tmp_path):
    """What a resume found lost stays lost, also for a later resume from an earlier checkpoint."""
    cfg, copy = died
    run = RunDir(tmp_path / "run")
    shutil.copytree(copy, run.path)
    with Path(f"{run.ledger}-wal").open("r+b") as file:
        file.truncate(Path(f"{run.ledger}-wal").stat().st_size // 4)
    Path(f"{run.ledger}-shm").unlink(missing_ok=True)
    check(died, tmp_path)
    before = trained_up_to(copy / "ledger.sqlite", 6)
    assert not before & set().union(*resume(cfg, tmp_path, 6))


def test_a_checkpoint_without_its_draws_is_refused_without_a_ledger(died, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(died[1], run.path)
    for path in run.path.glob("ledger.sqlite*"):
        path.unlink()
    saved = run.checkpoint(SAVED) / "orchestrator.json"
    saved.write_text(saved.read_text().replace('"next_draw"', '"another"'))
    with pytest.raises(DataError, match=r"which\s+draws were trained"):
        resume(died[0], tmp_path)


def test_what_flush_has_seen_is_on_the_disk(tmp_path, monkeypatch):
    """Every written file and its parent directories are flushed before a checkpoint is complete."""
    from stretto.base import files

    flushed: list[Path] = []
    real = files.os.fsync

    def fsync(fd: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{fd}").resolve())
        real(fd)

    monkeypatch.setattr(files.os, "fsync", fsync)
    run = RunDir(tmp_path / "run")
    ledger = Ledger(run, segment_bytes=1)
    ledger.run_started({})
    ledger._rotate()
    asyncio.run(ledger.flush())
    names = [path.relative_to(tmp_path).as_posix() for path in flushed]
    assert set(names) == {
        "run/tokens/segment_000000.bin", "run/tokens/segment_000001.bin", "run/ledger.sqlite-wal", "run/tokens", "run",
        ".",
    }  # fmt: skip
    flushed.clear()
    asyncio.run(ledger.flush())
    assert tmp_path / "run/tokens/segment_000000.bin" not in flushed
    ledger.close()


DAMAGES = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x55]) + data[len(data) // 2 + 1 :],
    "missing": lambda data: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_recovers_from_a_damaged_file_or_says_which_one_it_is(died, tmp_path, damage):
    """Whatever file of the run it is, each kind of name once."""
    cfg, copy = died
    files = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.stat().st_size]
    kinds = {re.sub(r"\d+", "N", str(path.relative_to(copy))): path.relative_to(copy) for path in files}
    assert len(kinds) >= 5, kinds
    for number, (kind, name) in enumerate(kinds.items()):
        run = RunDir(tmp_path / str(number) / "run")
        shutil.copytree(copy, run.path)
        data = DAMAGES[damage]((copy / name).read_bytes())
        (run.path / name).unlink()
        if data is not None:
            (run.path / name).write_bytes(data)
        try:
            resume(cfg, run.path.parent)
        except (DataError, ConfigError) as error:
            assert "checkpoints" in kind and "step" in str(error) and str(run.path) in str(error), error
        else:
            told = ("is damaged or cut off", "the end of the ledger was lost before a resume")
            assert all(line.endswith((*told, told[0] + ".")) for line in audit(run)), (kind, audit(run))
