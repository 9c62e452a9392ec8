"""What a frozen model has answered is not asked for again by a run that is continued, however it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from test_model_client import Judge, served

from stretto.config.root import FrozenModelSection
from stretto.config.sections.distill import FrozenModelPlace
from stretto.envs.models import ModelReply
from stretto_frozen.clients import open_models
from stretto_frozen.kept_replies import KeptReplies
from stretto_frozen.plan import source_of

LIFE = """
import asyncio, os, signal, sys
from contextlib import AsyncExitStack
from pathlib import Path
from stretto.config.sections.distill import FrozenModelPlace
from stretto_frozen.clients import open_models

url, directory, words = sys.argv[1:]

async def main():
    async with AsyncExitStack() as stack:
        place = FrozenModelPlace(base_url=url, model="big")
        judge = open_models({"judge": place}, stack, Path(directory))["judge"]
        for word in words:
            await judge.chat([{"role": "user", "content": word}])
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def asked_in(directory: Path | None, words: str, judge: Judge, **settings) -> list[bool]:
    """Whether each word was answered from the cache, by a client that lives for these words."""

    async def run():
        async with served(judge) as url, AsyncExitStack() as stack:
            # The address changes from start to start, as a port of this machine does.
            place = FrozenModelPlace(**{"base_url": url, "model": "big", "source": "digest"} | settings)
            client = open_models({"judge": place}, stack, directory)["judge"]
            return [(await client.chat([{"role": "user", "content": word}])).is_cached for word in words]

    return asyncio.run(run())


@pytest.mark.heavy
def test_a_process_that_was_killed_has_kept_every_reply_that_it_got(tmp_path):
    judge = Judge("1")

    async def lives(words: str) -> int:
        code = await asyncio.create_subprocess_exec(sys.executable, "-c", LIFE, url, str(tmp_path), words)
        return await code.wait()

    async def run():
        nonlocal url
        async with served(judge) as url:
            return [await lives("abc"), await lives("abcde")]

    url = ""
    assert asyncio.run(run()) == [-signal.SIGKILL] * 2
    assert [body["messages"][0]["content"] for body in judge.bodies] == list("abcde")


@pytest.mark.heavy
def test_a_later_start_has_the_replies_also_from_another_port_and_no_more_of_them_than_cache_size(tmp_path):
    judge = Judge("1")
    assert asked_in(tmp_path, "abcab", judge, cache_size=3) == [False] * 3 + [True] * 2
    assert asked_in(tmp_path, "abcd", judge, cache_size=3) == [True] * 3 + [False]
    assert asked_in(tmp_path, "bcda", judge, cache_size=3) == [True] * 3 + [False]
    assert asked_in(tmp_path, "dab", judge, cache_size=2) == [True, True, False]
    size = (tmp_path / "judge.sqlite").stat().st_size
    asked_in(tmp_path, "".join(map(chr, range(200, 900))), judge, cache_size=3)
    assert (tmp_path / "judge.sqlite").stat().st_size <= size + 8192


def test_nothing_is_kept_without_a_cache_or_a_directory(tmp_path):
    judge = Judge("1")
    assert asked_in(tmp_path, "aa", judge, cache_size=0) == [False, False] and not list(tmp_path.iterdir())
    assert asked_in(None, "aa", judge) == [False, True] and not list(tmp_path.iterdir())


def test_another_judge_is_asked_anew(tmp_path):
    judge = Judge("1")
    asked_in(tmp_path, "a", judge)
    assert asked_in(tmp_path, "a", judge, source="another digest") == [False]
    assert asked_in(tmp_path, "a", judge, model="bigger") == [False]


def test_the_digest_of_a_judge_follows_its_files_and_settings_and_no_places(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a")
    base = {"model": str(tmp_path), "device": "cpu"}
    digest = source_of(FrozenModelSection.model_validate(base))
    places = {"server": {"port": 9000}, "gpu_ids": [1], "client": {"max_concurrent": 3}}
    assert source_of(FrozenModelSection.model_validate(base | places)) == digest
    assert source_of(FrozenModelSection.model_validate(base | {"dtype": "bfloat16"})) != digest
    os.utime(weights, ns=(1, 1))
    assert source_of(FrozenModelSection.model_validate(base)) != digest


@pytest.mark.parametrize("damage", ["a page", "the head", "all", "a reply"])
def test_a_damaged_file_is_made_anew(damage, tmp_path, caplog):
    judge = Judge("1")
    asked_in(tmp_path, "abc", judge)
    path = tmp_path / "judge.sqlite"
    content = bytearray(path.read_bytes())
    reply = content.rindex(b'{"text"')
    whole = {"a page": slice(4096, 8192), "the head": slice(0, 100), "a reply": slice(reply, reply + 9)}
    broken = whole.get(damage, slice(0, len(content)))
    content[broken] = b"x" * len(content[broken])
    path.write_bytes(content)
    assert asked_in(tmp_path, "abc", judge) == [False] * 3
    assert "made anew" in caplog.text
    assert asked_in(tmp_path, "abc", judge) == [True] * 3


def test_a_full_disk_ends_the_keeping_and_not_the_run(tmp_path, caplog):
    kept = KeptReplies(tmp_path / "judge.sqlite", 10_000)
    list(kept.load())
    kept._db.execute("PRAGMA max_page_count = 3")
    for number in range(8):
        kept.add(bytes([number]) * 32, ModelReply(text="x" * 3000, message={}, finish_reason="stop"))
    assert caplog.text.count("kept in memory alone") == 1
    kept.close()


def test_a_place_that_cannot_be_written_ends_the_keeping_and_not_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert asked_in(tmp_path / "file", "aa", Judge("1")) == [False, True]
    assert "kept in memory alone" in caplog.text
