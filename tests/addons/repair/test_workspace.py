"""A directory that a policy works in survives kills: it and its answers are made again from the journal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from stretto.base.errors import EnvError
from stretto_repair import workspace
from stretto_repair.workspace import UNDONE, Workspace, remove_leftovers
from stretto_sandbox.sandbox import KEEPER, Sandbox, SandboxLimits, bubblewrap_trouble

pytestmark = pytest.mark.heavy

LIMITS = SandboxLimits(wall_s=60.0, work_bytes=4 << 20, max_depth=16)
FILES = {"a.txt": b"one\n", "deep/er/b.bin": bytes(range(256))}


@pytest.fixture(params=["bubblewrap", "subprocess"])
def sandbox(request):
    if request.param == "bubblewrap" and (trouble := bubblewrap_trouble()):
        pytest.skip(f"bubblewrap does not work here: {trouble}")
    return Sandbox(LIMITS, backend=request.param)


@pytest.fixture
def home(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):  # programs may run as another user
        if folder.owner() == tmp_path.owner() and folder.stat().st_mode & 0o777 == 0o700:
            folder.chmod(0o711)
    return tmp_path / "g1.0"


async def shell(work: Workspace, command: str) -> str:
    """The answer to a command, as a step of its own."""

    async def act() -> str:
        result = await work.run(["/bin/sh", "-c", f"exec 2>&1\n{command}"])
        return result.stdout if result.killed_for is None else result.killed_for

    return await work.step(command.encode(), act)


def opened(home: Path, sandbox: Sandbox, **changes) -> Workspace:
    return Workspace(home, FILES, sandbox, **{"origin": b"task 1"} | changes)


def tree(folder: Path) -> dict[str, tuple]:
    """All entries of a directory with their modes and contents."""
    found = {}
    for path in folder.rglob("*"):
        status = os.lstat(path)
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, content)
    return found


COMMANDS = (
    "cat a.txt; echo two >> a.txt; pwd",
    "mkdir new; mv deep/er new/moved; ln -s ../a.txt new/link; chmod 755 a.txt",
    "rm -r deep; printf '\\377' > deep; chmod 000 a.txt; mkfifo pipe; head -c 5 /dev/urandom | od",
    "cat new/link; ls -R",
)


async def test_files_stay_from_one_step_to_the_next_and_nothing_else(sandbox, home):
    async with opened(home, sandbox) as work:
        assert await shell(work, "cat a.txt; echo two > b; echo x > $TMPDIR/t; pwd") == "one\n/sandbox\n"
        assert await shell(work, "cat b; ls $TMPDIR") == "two\n"
        assert (await shell(work, "od -An -tu1 -N3 deep/er/b.bin")).split() == ["0", "1", "2"]
    assert not work.folder.exists()


async def test_steps_are_repeated_from_the_journal_without_running(sandbox, home):
    async with opened(home, sandbox) as work:
        answers = [await shell(work, command) for command in COMMANDS]
        files = tree(work.folder)
    async with opened(home, sandbox) as again:
        assert [await shell(again, command) for command in COMMANDS] == answers  # what is random, too
        assert not again.folder.exists() and again.num_replayed == len(COMMANDS)
        assert await shell(again, "echo on > on") == ""
        assert {name: entry for name, entry in tree(again.folder).items() if name != "on"} == files


async def test_the_first_other_step_continues_from_where_it_is(sandbox, home):
    async with opened(home, sandbox) as work:
        for command in ("echo 1 > n", "echo 2 > n", "echo 3 > n"):
            await shell(work, command)
    async with opened(home, sandbox) as again:
        assert await shell(again, "echo 1 > n") == ""
        assert await shell(again, "cat n") == "1\n"
    async with opened(home, sandbox) as last:
        await shell(last, "echo 1 > n")
        assert await shell(last, "cat n") == "1\n"
        assert last.num_replayed == 2


async def test_another_task_begins_anew(sandbox, home):
    async with opened(home, sandbox) as work:
        await shell(work, "echo x > a.txt")
    async with opened(home, sandbox, origin=b"task 2") as other:
        assert await shell(other, "echo x > a.txt; ls") == "a.txt\ndeep\n"
        assert other.num_replayed == 0


@pytest.mark.parametrize("lost", [1, 7, 30])
async def test_a_journal_that_was_cut_off_is_good_up_to_there(sandbox, home, lost):
    async with opened(home, sandbox) as work:
        await shell(work, "echo 1 > n")
        await shell(work, "echo 2 > n")
    journal = home / workspace.JOURNAL
    os.truncate(journal, journal.stat().st_size - lost)
    async with opened(home, sandbox) as again:
        await shell(again, "echo 1 > n")
        assert await shell(again, "echo 2 >> n; cat n") == "1\n2\n"
        assert again.num_replayed == 1


@pytest.mark.parametrize(
    "command",
    [
        "yes | head -c 3000000 > a.txt; cp a.txt b; sleep 20",
        "truncate -s 5M sparse",
        "for i in $(seq 20); do mkdir d; cd d; done",
        "touch a.txt; python3 -c 'open(b\"\\xff\", \"w\")' || printf x > $(printf '\\377')",
    ],
)
async def test_what_exceeds_the_limits_is_undone(sandbox, home, command):
    async with opened(home, sandbox) as work:
        await shell(work, "echo kept > kept")
        assert UNDONE in await shell(work, command)
        assert await shell(work, "cat kept a.txt; ls") == "kept\none\na.txt\ndeep\nkept\n"


async def test_links_lead_nowhere_else(sandbox, home, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    async with opened(home, sandbox) as work:
        await shell(work, f"ln -s {secret} link; ln -s {tmp_path} folder; rm a.txt; ln -s {secret} a.txt")
        await shell(work, "echo changed > link; echo changed > folder/secret; cat link; chmod 777 link")
        changes = await work.changes()
        assert changes["link"].content == os.fsencode(secret) and changes["a.txt"].kind == "l"
    async with opened(home, sandbox) as again:
        await shell(again, "true")
    assert secret.read_text() == "secret" and secret.stat().st_uid == os.getuid()


async def test_a_sandbox_that_is_killed_is_replaced_within_the_step(sandbox, home):
    async with opened(home, sandbox) as work:
        await shell(work, "echo 1 > n")
        running = asyncio.create_task(shell(work, "echo 2 >> n; sleep 1; cat n"))
        mine = psutil.Process()
        while not (keepers := [p for p in mine.children() if str(KEEPER) in p.cmdline()]):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        keepers[0].kill()
        assert await running == "1\n2\n"


async def test_sandboxes_that_cannot_be_built_fail_the_step(home):
    class Lost(Sandbox):
        async def run_in(self, *args, **settings):
            raise EnvError("gone", reason="sandbox_lost")

    async with opened(home, Lost(LIMITS, backend="subprocess")) as work:
        with pytest.raises(EnvError, match="gone"):
            await shell(work, "true")


async def test_a_journal_in_use_is_refused_after_a_while(home, sandbox, monkeypatch):
    monkeypatch.setattr(workspace, "LOCK_TIMEOUT_S", 0.2)
    async with opened(home, sandbox):
        with pytest.raises(EnvError, match="in use"):
            async with opened(home, sandbox):
                pass


async def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(sandbox, home):
    dead = home.parent / "dead"
    (dead / workspace.FILES).mkdir(parents=True)
    (dead / workspace.JOURNAL).write_bytes(b"")
    async with opened(home, sandbox) as work:
        await shell(work, "true")
        remove_leftovers(home.parent)
        assert work.folder.exists() and not (dead / workspace.FILES).exists()
        remove_leftovers(home.parent, kept=0)
        assert work.home.exists() and not dead.exists()


async def test_no_journal_of_a_process_that_was_killed_stays_locked(sandbox, home):
    home.mkdir()
    code = f"import fcntl, time\nf = open({str(home / workspace.JOURNAL)!r}, 'ab')\nfcntl.flock(f, fcntl.LOCK_EX)\n"
    process = subprocess.Popen(["python3", "-c", f"{code}print(1, flush=True)\ntime.sleep(60)"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    async with opened(home, sandbox) as work:
        assert await shell(work, "cat a.txt") == "one\n"
    process.wait()
    process.stdout.close()
    with (home / workspace.JOURNAL).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_calls_at_once_are_made_one_after_the_other(sandbox, home):
    async with opened(home, sandbox) as work:
        calls = (shell(work, f"cat n; echo {number} >> n") for number in range(4))
        answers = await asyncio.gather(*calls)
    assert [len(answer.splitlines()) for answer in answers[1:]] == [1, 2, 3]
    assert answers[3] == "0\n1\n2\n"
