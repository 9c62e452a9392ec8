"""The first process of a trial's namespaces (local_environment.py). Standard library only.

    unshare ... python -I -S first_process.py ROOT

It shows the machine's programs below ROOT, makes that its root, prints `ready`, and reaps what the trial leaves behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import NoReturn

SHOWN = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "opt", "nix")
"""Directories of the machine that a trial reads."""
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR, _READ_ONLY = -100, 0x8000, 442, 1


def main(root: str) -> NoReturn:
    _mount(root, root, "--bind")
    for name in SHOWN:
        source, target = f"/{name}", f"{root}/{name}"
        if os.path.islink(source):
            if not os.path.lexists(target):
                os.symlink(os.readlink(source), target)
        elif os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
            _mount(source, target, "--rbind")
            _make_read_only(target)
    _mount("/dev", f"{root}/dev", "--rbind")
    _mount("proc", f"{root}/proc", "--types", "proc")
    os.chroot(root)
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _mount(source: str, target: str, *options: str) -> None:
    subprocess.run(["mount", *options, source, target], check=True)


def _make_read_only(target: str) -> None:
    """With all that is mounted below it."""
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    libc, size = ctypes.CDLL(None, use_errno=True), ctypes.sizeof(attributes)
    if libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, size):
        sys.exit(f"{target} cannot be made readable only: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1])
