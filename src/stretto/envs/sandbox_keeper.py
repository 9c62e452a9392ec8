"""The two programs around untrusted code: `keep` outside the sandbox, `enter` inside. Standard library only.

    Sandbox.run -> keep -> [bwrap] -> enter -> python main.py

`keep` starts the rest, feeds it the request, watches time, memory, number of processes and output, and ends
by killing every descendant, whatever session or process group it moved to (orphans come back to it: it is
their subreaper). `enter` writes the files, gives up what it can give up and becomes the untrusted program.

Run as a script, never imported by the program it guards: `python -I -S sandbox_keeper.py keep`. A request,
one JSON object, is read from standard input; `keep` answers with another on standard output, and `probe`, which
needs none, with what this kernel grants to a program without bwrap. What `enter` has to
say goes through a pipe that is closed when it becomes the program, which can therefore not speak in its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from typing import NoReturn

POLL_S = 0.05
OVERHEAD_PROCESSES = 3  # ours among the descendants: bwrap twice, or `enter` twice; and the program
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
ENTERED = b"entered"  # all that `enter` says when nothing is wrong
LIBC = ctypes.CDLL(None, use_errno=True)


# -- outside --


def keep(request: dict) -> dict:
    """Run request["argv"] with the request on its standard input; what became of it, nothing left alive.

    "trouble" is why the program was never reached; None when it was, or when a limit ended it before.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Where root may make no control group, counting its processes must go before what they do.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    # The caller takes its request back by SIGTERM: what runs is ended all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    limits = request["limits"]
    started = time.monotonic()
    group = process_group(limits["max_processes"] + 2 * OVERHEAD_PROCESSES)
    said, inside = os.pipe()
    request["said"] = inside
    process = subprocess.Popen(
        request["argv"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd=request["cwd"],
        start_new_session=True,
        pass_fds=[inside],
        preexec_fn=None if group is None else lambda: _write(f"{group}/cgroup.procs", "0"),
    )
    os.close(inside)
    try:
        output, killed_for, peak = _watch(process, json.dumps(request).encode(), limits, started)
    finally:
        _end_descendants()
        if group is not None:
            with contextlib.suppress(OSError):
                os.rmdir(group)
    code = process.returncode
    with open(said, "rb") as file:
        words = file.read()  # everybody who could write is dead
    trouble = words.removeprefix(ENTERED) or (b"" if words else bytes(output[1][-500:]) or b"no reason given")
    return {
        "exit_code": None if killed_for else code if code >= 0 else 128 - code,
        "killed_for": killed_for,
        "stdout": output[0].decode(errors="replace"),
        "stderr": output[1].decode(errors="replace"),
        "wall_s": time.monotonic() - started,
        "peak_bytes": peak,
        "trouble": trouble.decode(errors="replace") if trouble and not killed_for else None,
    }


def process_group(max_processes: int) -> str | None:
    """A control group that holds no more processes than this; None where this user may not make one.

    The kernel's limit by user does not count root's processes, this one does.
    """
    bases = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            number, controllers, path = line.rstrip("\n").split(":", 2)
            if "pids" in controllers.split(","):
                bases.append(f"/sys/fs/cgroup/pids{path}")
            elif number == "0" and not controllers:
                bases.append(f"/sys/fs/cgroup{path}")
    for base in bases:
        group = f"{base.rstrip('/')}/stretto-{os.getpid()}"
        try:
            os.mkdir(group)
        except OSError:
            continue
        try:
            _write(f"{group}/pids.max", str(max_processes))
        except OSError:  # a group without this controller
            with contextlib.suppress(OSError):
                os.rmdir(group)
            continue
        return group
    return None


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _watch(process, request: bytes, limits: dict, started: float) -> tuple[list[bytearray], str | None, int]:
    """Feed, read and measure until the program ends or breaks a limit."""
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    open_pipes = list(output)
    unsent = memoryview(request)
    for pipe in (process.stdin, *open_pipes):
        os.set_blocking(pipe.fileno(), False)
    peak, killed_for, checked = 0, None, started
    while killed_for is None and (open_pipes or process.poll() is None):
        is_done = process.poll() is not None
        readable, writable, _ = select.select(
            open_pipes, [process.stdin] if unsent else [], [], 0 if is_done else POLL_S
        )
        if is_done and not readable:
            break  # what the program left running holds the pipes open, and dies next
        if writable:
            unsent = _feed(process.stdin, unsent)
        for pipe in readable:
            if not (chunk := pipe.read(65536)):
                open_pipes.remove(pipe)
                continue
            output[pipe] += chunk
            if len(output[pipe]) > limits["output_bytes"]:
                del output[pipe][limits["output_bytes"] :]
                killed_for = "output"
        now = time.monotonic()
        if now - started > limits["wall_s"]:
            killed_for = "time"
        elif now - checked >= POLL_S:
            checked = now
            pids = _descendants()
            memory = sum(map(_private_bytes, pids))
            peak = max(peak, memory)
            if memory > limits["memory_bytes"]:
                killed_for = "memory"
            elif len(pids) > limits["max_processes"] + OVERHEAD_PROCESSES:
                killed_for = "processes"
    return list(output.values()), killed_for, peak


def _feed(stdin, unsent: memoryview) -> memoryview:
    try:
        unsent = unsent[os.write(stdin.fileno(), unsent) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        unsent = unsent[:0]
    if not unsent:
        stdin.close()
    return unsent


def _descendants() -> list[int]:
    """Everybody below this process, by the parents in /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        children.setdefault(parent, []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # grows as it is read
        found += children.get(pid, ())
    return found


def _private_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (resident - shared) * resource.getpagesize()


def _end_descendants() -> None:
    """Kill until nobody is left. Stopped first, a fork bomb cannot outrun the signals."""
    while _descendants():
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in _descendants():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


# -- inside --


def enter(request: dict) -> None:
    """Write the files, drop what can be dropped, become the program. Never returns."""
    os.set_inheritable(request["said"], False)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for name, text in {**request["files"], ".stdin": request["stdin"]}.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
    os.dup2(os.open(".stdin", os.O_RDONLY), 0)
    os.unlink(".stdin")
    is_bubblewrapped = request["is_bubblewrapped"]
    is_alone = is_bubblewrapped or _leave_namespaces(request["said"])
    _drop_root(request["uid"])
    _set_limits(request["limits"], num_others=0 if is_alone else _threads_of_user())
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not is_bubblewrapped:
        landlock(readable=request["readable"], writable=[os.getcwd()])
    os.write(request["said"], ENTERED)
    os.execve(request["program"][0], request["program"], request["env"])


def unshare() -> bool:
    """Where the kernel allows it: no network, IPC and, for children, processes of its own."""
    flags = CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID
    is_root = os.geteuid() == 0
    return (is_root and LIBC.unshare(flags) == 0) or LIBC.unshare(flags | CLONE_NEWUSER) == 0


def _leave_namespaces(said: int) -> bool:
    """Go where nobody else is, if the kernel allows it. Returns in the innermost process.

    The first process of the new namespace takes everything with it when it ends.
    """
    if not unshare():
        return False
    if first := os.fork():
        _end_with(first, said)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Number 1 of a namespace ignores the signals that limits send: the program is its child.
    if program := os.fork():
        _end_with(program, said)
    return True


def _end_with(child: int, said: int) -> NoReturn:
    """End with the child's exit code as a shell gives it; orphans that end meanwhile are reaped."""
    os.close(said)  # which is the child's alone
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _set_limits(limits: dict, *, num_others: int) -> None:
    cpu_s = int(limits["wall_s"]) + 1
    wanted = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NPROC: limits["max_processes"] + num_others,
    }
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _threads_of_user() -> int:
    """Threads that count against this user's limit already, as far as this process can see them."""
    mine, count = os.getuid(), 0
    try:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{pid}").st_uid == mine:
                    count += len(os.listdir(f"/proc/{pid}/task"))
            except OSError:
                continue
    except OSError:
        return 0
    return count


def _drop_root(uid: int | None) -> None:
    """Root becomes the user `uid`, who owns nothing but the work directory; without one, root without rights."""
    if os.geteuid() != 0:
        return
    if uid is not None:
        for name in (".", *os.listdir(".")):
            os.chown(name, uid, uid)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        return
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def landlock_abi() -> int:
    """What the kernel's Landlock can; below 1: it has none."""
    return LIBC.syscall(444, None, ctypes.c_size_t(0), 1)


def landlock(readable: list[str], writable: list[str]) -> bool:
    """Deny every file outside these directories, TCP, and signals to others. False where the kernel has none.

    Source: Linux, Documentation/userspace-api/landlock.rst; rights up to ABI 6.
    """
    create, add_rule, restrict = 444, 445, 446
    abi = landlock_abi()
    if abi < 1:
        return False
    execute, write, read, read_dir = 1 << 0, 1 << 1, 1 << 2, 1 << 3
    of_files = execute | write | read | (1 << 14 if abi >= 3 else 0)
    everything = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    attributes = struct.pack("=QQQ", everything, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = LIBC.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0)
    devices = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]
    for path, rights in (
        *((path, execute | read | read_dir) for path in readable),
        *((path, everything) for path in writable),
        *((path, write | read) for path in devices),
    ):
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights &= everything if os.path.isdir(path) else of_files
        LIBC.syscall(add_rule, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    is_restricted = LIBC.syscall(restrict, ruleset, 0) == 0
    os.close(ruleset)
    return is_restricted


def main() -> None:
    mode = sys.argv[1]
    if mode == "probe":
        print(json.dumps({"landlock_abi": landlock_abi(), "has_namespaces": unshare()}))
        return
    request = json.loads(sys.stdin.buffer.read())
    if mode == "enter":
        try:
            enter(request)
        except Exception as cause:
            os.write(request["said"], f"{type(cause).__name__}: {cause}".encode(errors="replace")[:2000])
            os._exit(127)
    answer = keep(request)
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
