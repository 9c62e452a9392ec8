"""Ends and disturbs real runs again and again, resumes each, and audits its ledger after every life.

    python tests/campaigns/faults.py DIR --kind rl --fault kill --times 12 --seconds 280

--kind: rl, workers, files, critic, lora, teacher, exports, sft, eval, or service (a service and a run on it).
--fault: `kill`: kill -9 of one process, drawn from all of the run; `stop`: SIGSTOP for some seconds; `clock`: the clock
of all Python processes jumps by up to a day; `cut`: a power cut, after which files are as their last fsync left them;
`shm`: /dev/shm is full; `readonly`: the run's file system can only be read; `full`: it is full.

Every life is one line of DIR/results.jsonl; a life with `faults` broke a promise, and its output is in DIR/outputs. The
last three faults need root: they mount file systems that this process and its children alone see.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "e2e"), str(TESTS), str(TESTS.parent / "src")]

import kinds  # noqa: E402
from ports import free_ports  # noqa: E402
from runs import merged, toml  # noqa: E402

from stretto.base.errors import DataError  # noqa: E402
from stretto.base.paths import RunDir  # noqa: E402
from stretto.ledger.audit import audit  # noqa: E402

ENDS_S = 60.0
"""Longest time from a kill to the end of all other processes."""
STEPS_S = 90.0
"""Longest time in which a run that goes on makes a step."""
WRITTEN_S = 35.0
"""Files that nobody has flushed are on the disk by themselves after so long."""
CLOCK = "import time as _t\n_real = _t.time\ndef _now():\n    try: return _real() + float(open({path!r}).read())\n"
CLOCK += "    except (OSError, ValueError): return _real()\n_t.time = _now\n_t.time_ns = lambda: int(_now() * 1e9)\n"


class Life:
    """One start of a run, with all of its processes and their output."""

    def __init__(self, campaign: Campaign, number: int) -> None:
        self.campaign, self.number = campaign, number
        self.output = campaign.directory / "outputs" / f"{number:03d}.log"
        self.output.parent.mkdir(exist_ok=True)
        self.words = campaign.way_on()
        self.begun, self.first_step = time.monotonic(), campaign.step()
        self.popens: list[subprocess.Popen[bytes]] = []
        for verb, config in campaign.verbs:
            self.popens.append(self._start(verb, config))
            if verb == "serve":
                self._wait_for_service()

    def _start(self, verb: str, config: Path) -> subprocess.Popen[bytes]:
        words = self.words if verb != "eval" else []
        argv = [sys.executable, "-m", "stretto", verb, "@", str(config), *words]
        with self.output.open("ab") as log:
            env = os.environ | self.campaign.env
            return subprocess.Popen(argv, stdout=log, stderr=log, env=env, start_new_session=True)

    def _wait_for_service(self) -> None:
        """Wait until the hub has a trainer, or the service has ended."""
        deadline = time.monotonic() + STEPS_S
        while self.popens[0].poll() is None and time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(self.campaign.service_url + "/health", timeout=5):
                return
            time.sleep(0.2)

    def processes(self) -> dict[int, str]:
        """All living processes of this life with what each is."""
        found, parents = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError, IndexError, ValueError):
                    stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    if stat[0] != "Z":
                        parents[int(entry.name)] = int(stat[1])
        own = {popen.pid for popen in self.popens}
        while more := {pid for pid, parent in parents.items() if parent in own and pid not in own}:
            own |= more
        for pid in own & parents.keys():
            with suppress(OSError):
                found[pid] = role_of(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
        return found

    def wait_until_gone(self, pids: dict[int, str]) -> tuple[float, list[str]]:
        """Seconds until all of these processes have ended, and those that have not in time."""
        start = time.monotonic()
        while time.monotonic() - start < ENDS_S:
            for popen in self.popens:
                popen.poll()
            if not (left := [f"{role} {pid}" for pid, role in pids.items() if is_running(pid)]):
                return round(time.monotonic() - start, 2), []
            time.sleep(0.02)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ENDS_S, left

    def wait(self, seconds: float, *, step: int | None = None) -> bool:
        """Wait, or until there is a checkpoint of this step; whether the run is alive, and has it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(popen.poll() is not None for popen in self.popens):
                return False
            if step is not None and self.campaign.step() >= step:
                return True
            time.sleep(0.05)
        return step is None

    def end(self) -> None:
        """End it in good order, as Ctrl-C does; or by force."""
        pids = self.processes()
        for popen in self.popens[::-1]:
            if popen.poll() is None:
                popen.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    popen.wait(ENDS_S)
        self.kill_all(pids)

    def kill_all(self, pids: dict[int, str]) -> None:
        for pid in {*pids, *self.processes()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for popen in self.popens:
            popen.wait()

    def traceback(self) -> str | None:
        """The last exception that a process of this life printed."""
        text = self.output.read_text(errors="replace")
        found = re.findall(r"Traceback \(most recent call last\)(?:.*\n)+?[^ \n|]*\S*(?:Error|Exception)[^\n]*", text)
        return found[-1].splitlines()[-1] if found else None


def role_of(command: str) -> str:
    words = command.strip("\0").split("\0")
    for word in words:
        if word in ("rl", "sft", "serve", "eval"):
            return "launcher"
        if word in ("inference", "orchestrator", "trainer", "critic", "hub", "tenants", "view", "bridge", "evals"):
            return word
    for name in ("sandbox", "keeper", "workers", "multiprocessing", "bridge"):
        if name in command:
            return name
    return " ".join(words)[:60]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Campaign:
    """Lives of one run."""

    def __init__(self, directory: Path, kind: str, seed: int) -> None:
        self.directory, self.kind, self.rng = directory.resolve(), kind, random.Random(seed)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.runs = self.directory / "runs"
        self.runs.mkdir(exist_ok=True)
        self.run = RunDir(self.runs / "run")
        self.env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent / "src")}
        verb, config = kinds.settings(kind, kinds.model_in(self.directory))
        self.verb, self.verbs = verb, []
        own = {"output_dir": self.runs, "run": {"name": "run"}}
        if kind == "service":
            own = merged(own, self._service(config["model"]["name"]))
        if verb == "rl":
            control, rollouts, http = free_ports(3)
            own |= {"control": {"port": control}, "view": kind == "rl"}
            if kind != "files":
                own["rollout_transport"] = {"port": rollouts}
            if kind != "service":
                own["inference"] = {"server": {"port": http}}
        self._add(verb, merged(config, own))

    def _add(self, verb: str, config: dict[str, Any]) -> None:
        path = self.directory / f"{verb}.toml"
        path.write_text(toml(config))
        self.verbs.append((verb, path))

    def _service(self, model: Path) -> dict[str, Any]:
        hub, control, http = free_ports(3)
        token = "tml-" + "a" * 24
        self.env["ALICE_TOKEN"] = token
        config = {
            "output_dir": self.runs,
            "seq_len": 64,
            "run": {"name": "service"},
            "model": {"name": model},
            "control": {"port": control},
            "inference": {"server": {"port": http}, "max_model_len": 64},
            "service": {"port": hub, "save_steps": 3, "users": {"alice": {"token": token}}},
        }
        self._add("serve", config)
        self.service_url = f"http://127.0.0.1:{hub}"
        return {"service": {"url": self.service_url, "token_var": "ALICE_TOKEN"}}

    def step(self) -> int:
        if self.verb == "eval":
            return 0
        return self.run.latest_complete_checkpoint() or 0

    def way_on(self) -> list[str]:
        return ["--resume"] if self.step() else ["--clean"] if self.run.path.exists() else []

    def audit(self) -> list[str]:
        """What is wrong with the run now."""
        if not self.run.ledger.exists():
            return []
        try:
            return audit(self.run)
        except DataError as error:
            return [str(error)]


@contextmanager
def mounted(fault: str, campaign: Campaign) -> Iterator[None]:
    """A namespace of mounts of this process's own, with a small file system where the fault comes."""
    if fault in ("shm", "readonly", "full"):
        if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):
            raise SystemExit("unshare: this fault needs root")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        at = "/dev/shm" if fault == "shm" else str(campaign.runs)
        size = "64m" if fault == "shm" else "24m" if fault == "full" else "512m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", at], check=True)
    yield


def fill(directory: Path) -> Path:
    """A file that takes all the room that is left."""
    path = directory / ".filled"
    with path.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(512))
    return path


# -- faults: each returns what it did, and what was wrong --


def kill(life: Life) -> dict[str, Any]:
    pids = life.processes()
    roles = sorted(set(pids.values()))
    role = life.campaign.rng.choice(roles)
    victim = life.campaign.rng.choice([pid for pid, each in pids.items() if each == role])
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    time.sleep(3.0)
    goes_on = all(popen.poll() is None for popen in life.popens)
    if goes_on and life.campaign.kind != "service" and role in ("inference", "orchestrator", "trainer", "critic"):
        goes_on = life.wait(20.0)
    wrong = []
    if goes_on:  # it lives without that process: it must make steps, and the next victim is the launcher
        if not life.wait(STEPS_S, step=life.campaign.step() + 2) and life.campaign.verb != "eval":
            wrong.append(f"no step in {STEPS_S:g} s after {role} was killed")
        pids = life.processes()
    if goes_on or len(life.popens) > 1:  # a service goes on without its run, and a run waits for its service
        for popen in life.popens:
            popen.kill()
    gone_s, left = life.wait_until_gone(pids)
    return {"role": role, "goes_on": goes_on, "gone_s": gone_s, "wrong": wrong + [f"left: {each}" for each in left]}


def stop(life: Life) -> dict[str, Any]:
    pids = life.processes()
    role = life.campaign.rng.choice(sorted(set(pids.values())))
    victim = life.campaign.rng.choice([pid for pid, each in pids.items() if each == role])
    seconds = life.campaign.rng.uniform(1, 12)
    os.kill(victim, signal.SIGSTOP)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGCONT)
    is_on = life.wait(STEPS_S, step=life.campaign.step() + 2)
    life.end()
    wrong = [] if is_on else [f"no step in {STEPS_S:g} s, or it ended"]
    return {"role": role, "seconds": round(seconds, 1), "wrong": wrong}


def clock(life: Life) -> dict[str, Any]:
    jump = life.campaign.rng.choice([-86400.0, -3600.0, -60.0, 60.0, 3600.0, 86400.0])
    (life.campaign.directory / "clock" / "offset").write_text(str(jump))
    is_on = life.wait(STEPS_S, step=life.campaign.step() + 4)
    life.end()
    return {"jump": jump, "wrong": [] if is_on else [f"no step in {STEPS_S:g} s, or it ended"]}


def cut(life: Life) -> dict[str, Any]:
    life.kill_all(life.processes())
    campaign, now, changed = life.campaign, time.time(), 0
    for path, inode, born_at in files_of(campaign.runs):
        copy = campaign.directory / "kept" / str(inode)
        has_copy = copy.exists() and copy.stat().st_mtime >= born_at  # else it is of a file that was deleted
        if has_copy:
            content = copy.read_bytes()
        elif now - path.stat().st_mtime > WRITTEN_S:
            continue
        else:
            content = b""
        if content != path.read_bytes():
            changed += 1
            path.write_bytes(content)
    keep_all(campaign)
    return {"changed": changed, "wrong": []}


def files_of(directory: Path) -> list[tuple[Path, int, float]]:
    """Files below a directory, with their inodes and the times when these were made."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    if not paths:
        return []
    argv = ["stat", "--printf", "%i %.9W\\n", *map(str, paths)]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    return [(path, int(inode), float(at)) for path, (inode, at) in zip(paths, map(str.split, lines))]


def keep_all(campaign: Campaign) -> None:
    """Take the files as they are for what is on the disk."""
    kept = campaign.directory / "kept"
    for copy in kept.iterdir():
        copy.unlink(missing_ok=True)
    for path, inode, _ in files_of(campaign.runs):
        shutil.copyfile(path, kept / str(inode))


def no_room(life: Life) -> dict[str, Any]:
    """The end must name what is full, and the next life goes on from the last checkpoint."""
    fault = life.campaign.fault
    at = Path("/dev/shm") if fault == "shm" else life.campaign.runs
    filled = None
    if fault == "readonly":
        for _ in range(50):  # while a file is open for writing the kernel refuses: then a bind mount takes its place
            if not subprocess.run(["mount", "-o", "remount,ro", str(at)], stderr=subprocess.DEVNULL).returncode:
                break
            subprocess.run(["mount", "--bind", str(at), str(at)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(at)], check=True)
            break
    else:
        filled = fill(at)
    step = life.campaign.step()
    life.wait(30.0)
    codes = [popen.poll() for popen in life.popens]
    life.end()
    if filled is not None:
        filled.unlink(missing_ok=True)
    if fault == "readonly":
        subprocess.run(["umount", str(at)], stderr=subprocess.DEVNULL)
        subprocess.run(["mount", "-o", "remount,rw", str(at)], stderr=subprocess.DEVNULL)
    text = life.output.read_text(errors="replace")
    told = re.search(r"(?i)no space left|read-only file system|full|cannot write", text)
    wrong = [] if told or not any(codes) else ["the end does not say that there is no room"]
    return {"codes": codes, "at_step": step, "told": told[0] if told else None, "wrong": wrong}


FAULTS = {"kill": kill, "stop": stop, "clock": clock, "cut": cut, "shm": no_room, "readonly": no_room, "full": no_room}


def live(campaign: Campaign, number: int, fault: str) -> dict[str, Any]:
    """One life: start, fault, audit."""
    life, rng = Life(campaign, number), campaign.rng
    is_early = fault in ("kill", "cut") and rng.random() < 0.4
    if campaign.verb == "eval" or is_early:
        is_alive = life.wait(rng.uniform(0.2, 14.0))
    else:
        is_alive = life.wait(150.0, step=life.first_step + rng.randint(2, 8)) and life.wait(rng.uniform(0, 2))
    row: dict[str, Any] = {"kind": campaign.kind, "fault": fault, "number": number, "words": life.words}
    if is_alive:
        row |= FAULTS[fault](life)
    else:
        codes = [popen.poll() for popen in life.popens]
        is_over = campaign.verb == "eval" and codes == [0]
        row |= {"codes": codes, "wrong": [] if is_over else ["it ended by itself, or made no step, before any fault"]}
        life.kill_all(life.processes())
    row |= {
        "steps": [life.first_step, campaign.step()],
        "is_early": is_early,
        "lived_s": round(time.monotonic() - life.begun, 1),
    }
    if fault not in ("cut",):
        row["wrong"] += campaign.audit()[:5]
    if trace := life.traceback():
        row["traceback"] = trace[:300]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", default="rl")
    parser.add_argument("--fault", choices=FAULTS, default="kill")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=280.0, help="begin no further life after so long")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    begun = time.monotonic()
    campaign = Campaign(args.directory, args.kind, args.seed)
    campaign.fault, campaign.started_at = args.fault, time.time()
    if args.fault == "cut":
        library, kept = campaign.directory / "power_cut.so", campaign.directory / "kept"
        kept.mkdir(exist_ok=True)
        keep_all(campaign)
        source = Path(__file__).with_name("power_cut.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True)
        campaign.env |= {"LD_PRELOAD": str(library), "CUT_ROOT": str(campaign.runs), "CUT_KEPT": str(kept)}
    if args.fault == "clock":
        site = campaign.directory / "clock"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(CLOCK.format(path=str(site / "offset")))
        campaign.env["PYTHONPATH"] = f"{site}:{campaign.env['PYTHONPATH']}"
    num_wrong = 0
    with mounted(args.fault, campaign), (args.directory / "results.jsonl").open("a", buffering=1) as results:
        for number in range(args.times):
            if time.monotonic() - begun > args.seconds:
                break
            row = live(campaign, number, args.fault)
            num_wrong += bool(row["wrong"])
            results.write(json.dumps(row) + "\n")
            print({key: value for key, value in row.items() if key not in ("kind", "fault")}, flush=True)
        if args.fault == "cut" and (wrong := campaign.audit()):
            print("audit at the end:", wrong[:5])
    print(f"{args.kind} {args.fault}: {number + 1} lives, {num_wrong} with faults, step {campaign.step()}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
