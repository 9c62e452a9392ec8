"""Programs that do not behave: what they start ends with them, and what they ask beyond their rollout is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from programs import RESULT, play, script, write_records
from waiting import is_running, until

from stretto.records.outcomes import Reason
from stretto.records.rollout import RolloutStatus
from stretto_agents import program
from stretto_agents.server import Gateway

pytestmark = pytest.mark.heavy


def says_result(prompt, rng, version):
    return RESULT


@pytest.fixture
def records(tmp_path):
    return write_records(tmp_path)


def stays(folder, code="time.sleep(600)"):
    """Python that starts a process which ignores SIGTERM, in a session of its own, and writes its id."""
    inner = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {code}"
    return f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {inner!r}], start_new_session=True)
open({str(folder / "pid")!r}, "w").write(str(child.pid))
"""


def test_what_a_program_has_started_ends_with_it(records, tmp_path):
    [rollout] = play(script("ask([user('a')])" + stays(tmp_path)), records, says_result).rollouts
    assert rollout.status is RolloutStatus.FINISHED
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_program_that_ignores_sigterm_is_ended_with_what_it_has_started(records, tmp_path):
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); ask([user('a')])"
    text += stays(tmp_path) + "time.sleep(600)"
    [rollout] = play(script(text), records, says_result, timeout_s=3.0).rollouts
    assert rollout.reason is Reason.TIME_LIMIT and rollout.reward == 1.0
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_programs_end_with_a_process_that_is_killed(records, tmp_path):
    text = f"import os; open({str(tmp_path / 'own')!r}, 'w').write(str(os.getpid()))" + stays(tmp_path)
    text += f"open({str(tmp_path / 'ready')!r}, 'w'); import time; time.sleep(600)"
    code = f"import sys; from programs import play, script; play(script({text!r}), {records!r})"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
    try:
        asyncio.run(until((tmp_path / "ready").exists))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    pids = [int((tmp_path / name).read_text()) for name in ("own", "pid")]
    asyncio.run(until(lambda: not any(map(is_running, pids))))


def test_of_what_a_program_prints_the_end_is_kept(records, tmp_path):
    text = "ask([user('a')]); [print('x' * 2**20) for n in range(100)]; print('4042')"
    [rollout] = play(script(text), records, says_result, output_dir=str(tmp_path / "kept")).rollouts
    [kept] = (tmp_path / "kept").rglob("*.txt")
    assert rollout.status is RolloutStatus.FINISHED
    assert kept.stat().st_size == program.MAX_OUTPUT_BYTES and kept.read_text().endswith("x\n4042\n")


def test_a_program_that_prints_without_end_is_ended(records, monkeypatch):
    monkeypatch.setattr(program, "MAX_PRINTED_BYTES", 2**20)
    text = "ask([user('a')])\nwhile True: print('x' * 1000); import time; time.sleep(0.0005)"
    [rollout] = play(script(text), records, says_result).rollouts
    assert rollout.status is RolloutStatus.FAILED and "printed more than" in rollout.error


def test_a_program_that_reads_its_input_finds_its_end(records):
    [rollout] = play(script("ask([user('a')]); print(repr(sys.stdin.read()))"), records, says_result).rollouts
    assert rollout.status is RolloutStatus.FINISHED


def test_what_looks_like_a_secret_reaches_a_program_only_by_name(records, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "PGPASSWORD", "ANTHROPIC_AUTH_TOKEN", "OPENAI_API_BASE", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("no_proxy", "intranet")
    text = "ask([user('a')]); print(*(f'{name}={value}' for name, value in os.environ.items()), sep='\\n')"
    kept = tmp_path / "kept"
    play(script(text), records, says_result, output_dir=str(kept), pass_env=["GITHUB_TOKEN"])
    [path] = kept.rglob("*.txt")
    given = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
    assert [name for name, value in given.items() if value == "mine"] == ["GITHUB_TOKEN"]
    assert given["OPENAI_API_KEY"].startswith("sk-") and given["HOME"] == os.environ["HOME"]
    assert given["no_proxy"] == "intranet,127.0.0.1"


async def test_a_key_that_is_wrong_or_of_a_rollout_that_is_over_is_refused():
    gateway = Gateway()
    async with gateway.open(SimpleNamespace()) as access:
        pass
    try:
        async with aiohttp.ClientSession() as client:
            for route, header in (("chat/completions", "Authorization"), ("messages", "x-api-key")):
                for key in (access.key, "sk-other", ""):
                    async with client.post(f"{access.base_url}/{route}", headers={header: key}) as reply:
                        assert reply.status == 401
                        assert "no rollout has this key, or it is over" in await reply.text()
    finally:
        await gateway.close()


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_know_and_may_be_shortened(records):
    text = """
from urllib.error import HTTPError
ask([user("a")])
try:
    ask([user("a" * 400)])
except HTTPError as error:
    refused = json.load(error)["error"]
    assert error.code == 400 and refused["code"] == "context_length_exceeded", refused
    assert "prompt is too long" in refused["message"] and "maximum context length is" in refused["message"]
else:
    sys.exit("it was answered")
ask([user("b")])
"""
    [rollout] = play(script(text), records, says_result, seq_len=300).rollouts
    assert rollout.status is RolloutStatus.FINISHED, rollout.error
    [failed] = play(script("ask([user('a' * 400)])"), records, says_result, seq_len=300).rollouts
    assert failed.reason is Reason.NO_REPLY and "seq_len = 300" in failed.error


def test_a_program_that_goes_on_asking_beyond_a_limit_is_ended(records):
    text = """
from urllib.error import HTTPError
import time
ask([user("first")])
for number in range(600):
    try:
        ask([user("more")])
    except HTTPError as error:
        assert error.code == 403, error.code
    time.sleep(0.1)
"""
    [rollout] = play(script(text), records, says_result, max_turns=1).rollouts
    assert rollout.reason is Reason.TURN_LIMIT and rollout.reward == 1.0
