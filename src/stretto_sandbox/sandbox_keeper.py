"""The programs around untrusted code: `keep` outside the sandbox, `enter` inside. Standard library only.

    Sandbox.run -> keep -> [bwrap] -> enter -> python main.py

`keep` starts the rest, sends it the request, watches time, memory, number of processes and output, and at the end
kills every descendant, whatever session or process group it moved to (`keep` is their subreaper, so orphans become
its children). `enter` writes the files, drops its privileges and becomes the untrusted program.

This file runs as a script and is never imported by the program it guards: `python -I -S sandbox_keeper.py keep`. It
reads a request, one JSON object, from standard input; `keep` answers with another on standard output. `probe` needs no
request and prints what this kernel grants to a program without bwrap. `enter` reports errors through a pipe, which is
closed when it becomes the program, so that the program cannot write reports.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import resource
import select
import signal
import stat
import struct
import sys
import time

# Every run starts this file twice: what only some need, or only a type checker, would take a tenth of a run's time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import IO, Any, NoReturn

POLL_S = 0.05
BLOCK_BYTES = 4096
OVERHEAD_PROCESSES = 3
"""Descendants that the program has not started: bwrap twice or `enter` twice, and itself."""
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
PR_SET_SECCOMP = 22
REFUSED_CALLS = {  # by machine: its number in audit.h, and the numbers of the calls
    "x86_64": (0xC000003E, (41, 425, 426, 427, 248, 249, 250, 101, 310, 311, 438, 321, 298, 323)),
    "aarch64": (0xC00000B7, (198, 425, 426, 427, 217, 218, 219, 117, 270, 271, 438, 280, 241, 282)),
}
"""socket; io_uring_setup, _enter, _register (they open sockets too); add_key, request_key, keyctl; ptrace,
process_vm_readv, process_vm_writev, pidfd_getfd; bpf, perf_event_open, userfaultfd."""
ENTERED, GUARDED = b"entered", b"guarded"
"""The report of `enter` if nothing went wrong; GUARDED if it cannot reach those that wait for it."""
LIBC = ctypes.CDLL(None, use_errno=True)


# -- outside --


def keep(request: dict) -> dict:
    """Run request["argv"] with the request on its standard input, and kill all its processes at the end.

    Returns the fields of a SandboxResult and "trouble": why the program was never started, or None.
    """
    import subprocess

    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # If root may not make a control group, this process must get CPU time to count processes during a fork bomb.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    limits = request["limits"]
    started = time.monotonic()
    group = process_group(limits["max_processes"] + 2 * OVERHEAD_PROCESSES)
    report_read, report_write = os.pipe()
    request["report_fd"] = report_write
    process = subprocess.Popen(
        request["argv"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd=request["cwd"],
        start_new_session=True,
        pass_fds=[report_write],
        preexec_fn=None if group is None else lambda: _write(f"{group}/cgroup.procs", "0"),
    )
    os.close(report_write)
    try:
        output, killed_for, peak = _watch(process, json.dumps(request).encode(), limits, started, request["watched"])
    finally:
        _end_descendants()
        if group is not None:
            with contextlib.suppress(OSError):
                os.rmdir(group)
    code = process.returncode
    with open(report_read, "rb") as file:
        report = file.read()  # all possible writers are dead
    trouble = report.removeprefix(ENTERED).removeprefix(GUARDED)
    if not report:
        trouble = bytes(output[1][-500:]) or b"no reason given"
    elif report == GUARDED and code is not None and code < 0:
        trouble = b"signal %d has ended a process between it and the program" % -code
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
    """A new control group with at most this many processes; None if this user may not make one.

    Unlike the kernel's limit per user, it also counts root's processes.
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


def _watch(
    process: subprocess.Popen[bytes], request: bytes, limits: dict[str, Any], started: float, watched: list[str]
) -> tuple[list[bytearray], str | None, int]:
    """Write the request, read output and measure until the program ends or exceeds a limit.

    `watched` are directories whose size is limited too. Returns the output, the limit that ended it, the peak memory.
    """
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None and stdout is not None and stderr is not None, "they are pipes"
    output = {stdout: bytearray(), stderr: bytearray()}
    open_pipes = list(output)
    unsent = memoryview(request)
    for pipe in (stdin, *open_pipes):
        os.set_blocking(pipe.fileno(), False)
    peak, killed_for, checked = 0, None, started
    while killed_for is None and (open_pipes or process.poll() is None):
        is_done = process.poll() is not None
        readable, writable, _ = select.select(open_pipes, [stdin] if unsent else [], [], 0 if is_done else POLL_S)
        if is_done and not readable:
            break  # processes that the program left running hold the pipes open; they are killed next
        if writable:
            unsent = _write_some(stdin, unsent)
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
            elif watched and is_over(watched, pids, limits["work_bytes"], limits["max_depth"]):
                killed_for = "files"
    return list(output.values()), killed_for, peak


def _write_some(stdin: IO[bytes], unsent: memoryview) -> memoryview:
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
    """All descendants of this process, by the parents in /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        children.setdefault(parent, []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # the list grows during the loop
        found += children.get(pid, ())
    return found


def _private_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (resident - shared) * resource.getpagesize()


def is_over(watched: list[str], pids: list[int], max_bytes: int, max_depth: int | None) -> bool:
    """Do the files below directories, and unlinked files that are still open, take more space than this?

    Every entry counts as at least one block, so that many empty files reach the limit too. Files that vanish during
    the check do not count. Directories more than `max_depth` deep in each other are over the limit whatever they hold.
    """
    total, folders = sum(map(_unlinked_bytes, pids)), [(folder, 0) for folder in watched]
    while folders:
        folder, depth = folders.pop()
        if max_depth is not None and depth > max_depth:
            return True
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += max(entry.stat(follow_symlinks=False).st_blocks * 512, BLOCK_BYTES)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
                if total > max_bytes:
                    return True
    return total > max_bytes


def _unlinked_bytes(pid: int) -> int:
    """Bytes of a process's open files that were unlinked."""
    total = 0
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{number}")
                if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                    total += found.st_blocks * 512
    return total


def _end_descendants() -> None:
    """Kill all descendants. They are stopped first, so that a fork bomb cannot outrun the signals."""
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
    """Write the files, drop privileges, and become the program. Never returns."""
    os.set_inheritable(request["report_fd"], False)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for name, text in request["files"].items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
    # Not a file of the directory: an earlier program may have put a link there, and this one is still root.
    stdin = os.memfd_create("stdin")
    with open(stdin, "wb", closefd=False) as file:
        file.write(request["stdin"].encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    is_bubblewrapped = request["is_bubblewrapped"]
    is_alone = is_bubblewrapped or _enter_namespaces(request["report_fd"])
    _drop_root(request["uid"], is_new=not request["is_kept"])
    _set_limits(request["limits"], num_others=0 if is_alone else _threads_of_user())
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not is_bubblewrapped:
        landlock(readable=request["readable"], writable=[os.getcwd(), *request["writable"]])
    refuse_calls()
    os.write(request["report_fd"], GUARDED if is_alone else ENTERED)
    os.execve(request["program"][0], request["program"], request["env"])


def unshare() -> bool:
    """Move into new namespaces (network, IPC, host name; processes for children). False if the kernel refuses."""
    flags = CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID
    is_root = os.geteuid() == 0
    return (is_root and LIBC.unshare(flags) == 0) or LIBC.unshare(flags | CLONE_NEWUSER) == 0


def _enter_namespaces(report_fd: int) -> bool:
    """Enter new namespaces, if the kernel allows it. Returns in the innermost process.

    When the first process of the new namespace ends, the kernel kills all others in it.
    """
    if not unshare():
        return False
    if first := os.fork():
        _end_with(first, report_fd, is_guard=True)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Process 1 of a namespace ignores the signals that limits send, so the program must be its child.
    if program := os.fork():
        _end_with(program, report_fd)
    return True


def _end_with(child: int, report_fd: int, *, is_guard: bool = False) -> NoReturn:
    """Wait for the child, reaping orphans, and exit with its exit code as a shell gives it.

    is_guard: the child waits for the program; if a signal has ended it, which the program cannot do, end by one, too.
    """
    os.close(report_fd)  # only the child may write reports
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            if is_guard and code < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(code if code >= 0 else 128 - code)


def _set_limits(limits: dict, *, num_others: int) -> None:
    cpu_s = int(limits["wall_s"]) + 1
    values = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NPROC: limits["max_processes"] + num_others,
    }
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _threads_of_user() -> int:
    """Threads that already count against this user's limit, as far as this process can see them."""
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


def _drop_root(uid: int | None, *, is_new: bool) -> None:
    """If root: become the user `uid`, who owns the work directory only; without one, drop all capabilities.

    is_new: the directory gets its owner here; a directory that is kept has it already, and may have links to elsewhere.
    """
    if os.geteuid() != 0:
        return
    if uid is not None:
        for name in (".", *os.listdir(".")) if is_new else ():
            os.chown(name, uid, uid)
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        return
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def landlock_abi() -> int:
    """Version of the kernel's Landlock; below 1 if it has none."""
    return LIBC.syscall(444, None, ctypes.c_size_t(0), 1)


def landlock(readable: list[str], writable: list[str]) -> bool:
    """Deny all files outside these directories, TCP, and signals to other processes. False if not supported.

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


def refuse_calls() -> bool:
    """Let the kernel refuse sockets of every family, and what reaches into other processes. False if it has no filter.

    Neither Landlock nor a network namespace rules connections to sockets by file name, netlink and vsock. A socket pair
    is allowed: it reaches nobody else. Calls in another machine's convention (32 bits) are refused altogether.
    Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
    """
    machine = os.uname().machine
    if machine not in REFUSED_CALLS or struct.calcsize("P") != 8:
        return False
    architecture, calls = REFUSED_CALLS[machine]
    load, jump_equal, jump_at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EACCES
    code = [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (answer, 0, 0, refuse), (load, 0, 0, 0)]
    code += [(jump_at_least, 0, 1, 1 << 30), (answer, 0, 0, refuse)]  # x32
    for call in calls:
        code += [(jump_equal, 0, 1, call), (answer, 0, 0, refuse)]
    code.append((answer, 0, 0, allow))
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    head = struct.pack("@HP", len(code), ctypes.addressof(program))
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return LIBC.prctl(PR_SET_SECCOMP, 2, head, 0, 0) == 0


def remove(folder: str) -> None:
    """Remove a work directory, however deep it is and whatever permissions the program set. No process uses it."""
    if os.path.islink(folder):
        os.unlink(folder)
    elif os.path.exists(folder):
        with contextlib.suppress(OSError):
            flatten(folder)
        if os.path.exists(folder):
            import subprocess

            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run([*command, folder], stderr=subprocess.DEVNULL, check=False)


def flatten(folder: str) -> None:
    """Remove a directory by moving what is in its directories up into it, one level at a time.

    Paths stay short, and nothing recurses, for thousands of directories in each other.
    """
    os.chmod(folder, 0o700)
    names, waiting = itertools.count(), []
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            waiting.append(entry.path)
        else:
            os.unlink(entry.path)
    while waiting:
        path = waiting.pop()
        os.chmod(path, 0o700)
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # a directory that moves is written to
                target = os.path.join(folder, f".removed.{os.getpid()}.{next(names)}")
                os.rename(entry.path, target)
                waiting.append(target)
            else:
                os.unlink(entry.path)
        os.rmdir(path)
    os.rmdir(folder)


def _exit_on_signal(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def main() -> None:
    mode = sys.argv[1]
    if mode == "probe":
        print(json.dumps({"landlock_abi": landlock_abi(), "has_namespaces": unshare(), "has_filter": refuse_calls()}))
        return
    if mode == "keep":
        # If the caller cancels the run by SIGTERM, or is killed itself, the program is killed too.
        signal.signal(signal.SIGTERM, _exit_on_signal)
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    request = json.loads(sys.stdin.buffer.read())
    if mode == "enter":
        try:
            enter(request)
        except Exception as cause:  # the program must not run outside of the sandbox
            os.write(request["report_fd"], f"{type(cause).__name__}: {cause}".encode(errors="replace")[:2000])
            os._exit(127)
    is_reported = False
    try:
        sys.stdout.write(json.dumps(keep(request)))
        sys.stdout.flush()
        is_reported = True
    finally:
        if not is_reported:  # the caller may be dead, and then no other process removes the directory
            remove(request["removed"])


if __name__ == "__main__":
    main()
