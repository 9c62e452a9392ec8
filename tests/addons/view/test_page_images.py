"""Images in the page: made from the ledger by hash, always as PNG."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import ledger_runs
import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image as pillow

from stretto.base.paths import RunDir
from stretto.chat.patches import ImageProcessor
from stretto.chat.scratch import build_scratch_files, image_processor_of
from stretto.config.sections.model import ScratchSection, ScratchVisionSection
from stretto.records.images import Image
from stretto_view.page.app import build
from stretto_view.page.library import Library

VISION = ScratchVisionSection()
PIXELS = np.random.default_rng(0).integers(0, 256, (32, 48, 3)).astype(np.uint8)


def shown() -> Image:
    return image_processor_of(VISION).process(pillow.fromarray(PIXELS))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with one group whose first rollout shows an image."""
    found = RunDir(tmp_path / "seeing")
    found.configs.mkdir(parents=True)
    found.config("run").write_text(json.dumps({"model": {"name": None}, "tokenizer": {"name": None}}))
    run = ledger_runs.Run(found).begin()
    run.start(0)
    group = ledger_runs.group(0, 0)
    first = group.rollouts[0]
    seeing = msgspec.structs.replace(first.branches[0], images=(shown(),))
    rollouts = (msgspec.structs.replace(first, branches=(seeing,)), *group.rollouts[1:])
    run.ledger.groups_finished([msgspec.structs.replace(group, rollouts=rollouts)])
    run.close()
    build_scratch_files(found.tokenizer, ScratchSection(family="qwen3_vl", vision=VISION))
    return found


@pytest.fixture
async def page(run_dir: RunDir) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(build(Library([run_dir.path.parent])))) as client:
        yield client


async def test_an_image_of_a_rollout_is_shown_as_the_model_saw_it(page: TestClient) -> None:
    (run,) = await (await page.get("/api/runs")).json()
    asked = f"/api/run/{run['id']}"
    found = await (await page.get(f"{asked}/rollout", params={"group": 0, "member": 0})).json()
    assert found["branches"][0]["images"] == [shown().hash]
    other = await (await page.get(f"{asked}/rollout", params={"group": 0, "member": 1})).json()
    assert other["branches"][0]["images"] == []
    answer = await page.get(f"{asked}/image/{shown().hash}")
    assert answer.status == 200 and answer.headers["Content-Type"] == "image/png"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    pixels = np.asarray(pillow.open(io.BytesIO(await answer.read())))
    np.testing.assert_array_equal(pixels, PIXELS)


@pytest.mark.parametrize("name", ["0" * 32, "..%2F..%2Fledger.sqlite", "0" * 31 + "g", "%27%20OR%201"])
async def test_what_is_no_image_of_the_run_is_not_found(page: TestClient, name: str) -> None:
    (run,) = await (await page.get("/api/runs")).json()
    answer = await page.get(f"/api/run/{run['id']}/image/{name}")
    assert answer.status == 404 and answer.headers["Content-Type"].partition(";")[0] != "image/png"
    assert (await page.get(f"/api/run/nobody/image/{'0' * 32}")).status == 404


async def test_patches_of_another_model_are_a_message(page: TestClient, run_dir: RunDir) -> None:
    ImageProcessor(patch_size=16).save(run_dir.tokenizer)
    (run,) = await (await page.get("/api/runs")).json()
    answer = await page.get(f"/api/run/{run['id']}/image/{shown().hash}")
    assert answer.status == 404 and "does not fit the model's image processor" in (await answer.json())["error"]
