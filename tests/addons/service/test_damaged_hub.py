"""Files of a service that a power cut has emptied or cut: the next hub goes on, or says which file it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.base import secret
from stretto.base.errors import ConfigError
from stretto_service.config import ServeConfig
from stretto_service.futures import Result
from stretto_service.main import build
from stretto_service.store import Run
from stretto_service.wires.operations import TenantSpec

DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "flipped": lambda data: b"".join([data[: len(data) // 2], b"\0\1\2\3", data[len(data) // 2 + 4 :]]),
    "missing": lambda data: None,
}
STEP = b"{}"


async def left_by_a_hub(directory: Path) -> tuple[ServeConfig, Path]:
    """A service with a run that has requests, a result and weights: its config, and a copy of its files."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 100, "max_position_embeddings": 64}))
    urls = {"engine_urls": ["http://127.0.0.1:1"]}
    root = {"output_dir": str(directory), "model": {"name": str(model)}, "service": urls}
    cfg = ServeConfig.model_validate(root)
    hub, _ = build(cfg)
    run = Run(id="r", owner="user", spec=TenantSpec(name="r", rank=4), base_model="m", created_at=0.0)
    hub.training.create(run)
    for seq in (1, 2):
        await hub.training.receive(run, "step", seq, STEP)
    hub.training.places.tenants["r"].journal.write_result(1, Result.of({"step": 1}))
    hub.audit.write("user", "step")
    (hub.training.directory / "r" / "weights" / "first").mkdir(parents=True)
    await hub.close()
    shutil.copytree(cfg.run_dir.path, directory / "copy")
    return cfg, directory / "copy"


@pytest.mark.heavy
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_hub_recovers_from_a_damaged_file_or_says_which_one_it_is(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are never deleted because their record is lost."""
    monkeypatch.setattr(secret, "_WRITTEN_WITHIN_S", 0.1)
    cfg, copy = await left_by_a_hub(tmp_path)
    names = [path.relative_to(copy) for path in copy.rglob("*") if path.is_file() and path.stat().st_size]
    assert {path.name for path in names} >= {"secret", "tokens.json", "service.sqlite", "00000001.result"}
    for name in names:
        run = cfg.run_dir.path
        shutil.rmtree(run)
        shutil.copytree(copy, run)
        data = DAMAGES[damage]((copy / name).read_bytes())
        (run / name).unlink() if data is None else (run / name).write_bytes(data)
        try:
            hub, _ = build(cfg)
        except ConfigError as error:
            assert str(run / name) in str(error), error
            continue
        assert "service.sqlite" not in name.name or damage == "flipped", name
        try:
            assert (hub.training.directory / "r" / "weights" / "first").is_dir()
            if name.suffix == ".step" and data is not None:
                [failed] = hub.store.all(Run)
                assert failed.state == "failed" and name.name in failed.reason and not hub.training.places.tenants
                continue
            tenant = hub.training.places.tenants["r"]
            waiting = [job.payload.kind for job in hub.training.queue.requests("r")]
            is_lost = name.suffix == ".step"
            assert waiting[0] == "create" and (is_lost or waiting == ["create", "step", "step"]), name
            assert 1 in tenant.journal.results() or name.suffix == ".result", name
        finally:
            await hub.close()
