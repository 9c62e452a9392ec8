"""Untrusted programs reach no socket of the machine, in either back end, as root too."""

from __future__ import annotations

import socket
import threading

import pytest

from stretto_sandbox.sandbox import Sandbox, SandboxLimits, bubblewrap_trouble

pytestmark = pytest.mark.heavy

FAMILIES = ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "AF_BLUETOOTH", "AF_CAN"]
WAYS = {
    "stream": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(PATH)\nprint('in')",
    "datagram": "import socket\n"
    "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.sendto(b'x', PATH)\nprint('in')",
    "abstract": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0stretto-test')\nprint('in')",
    "listens": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('mine')\ns.listen()\nprint('in')",
    "libc": "import ctypes\nprint('in' if ctypes.CDLL(None).socket(1, 1, 0) >= 0 else 'no')",
    "raw call": "import ctypes\nprint('in' if ctypes.CDLL(None).syscall(CALL, 1, 1, 0) >= 0 else 'no')",
    "x32": "import ctypes\nprint('in' if ctypes.CDLL(None).syscall(0x40000000 | 41, 1, 1, 0) >= 0 else 'no')",
    "io_uring": "import ctypes\nb = ctypes.create_string_buffer(120)\n"
    "print('in' if ctypes.CDLL(None).syscall(425, 4, b) >= 0 else 'no')",
    "child": "import os\npid = os.fork()\nif not pid:\n"
    "    import socket\n    socket.socket(socket.AF_UNIX).connect(PATH)\n"
    "    print('in')\nos.wait() if pid else None",
    "other program": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', "
    '"import socket; socket.socket(socket.AF_UNIX).connect(" + repr(PATH) + "); print(\'in\')"])',
    "thread": "import socket, threading\nt = threading.Thread(target=lambda: (socket.socket(socket.AF_UNIX)"
    ".connect(PATH), print('in')))\nt.start()\nt.join()",
    "keys": "import ctypes\nprint('in' if ctypes.CDLL(None).syscall(250, 0, -3, 1) >= 0 else 'no')",
    "ptrace": "import ctypes, os\nprint('in' if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) >= 0 else 'no')",
}


@pytest.fixture(params=["subprocess", "bubblewrap"])
def backend(request):
    if request.param == "bubblewrap" and (trouble := bubblewrap_trouble()):
        pytest.skip(trouble)
    return request.param


async def output(backend, code: str) -> str:
    result = await Sandbox(SandboxLimits(wall_s=20), backend=backend).run(code)
    return result.stdout


@pytest.fixture
def path(tmp_path):
    """A socket that answers whoever reaches it."""
    found = str(tmp_path / "agent")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(found)
        listener.listen()
        threading.Thread(target=lambda: [listener.accept() for _ in range(9)], daemon=True).start()
        yield found


@pytest.mark.parametrize("way", WAYS)
async def test_no_socket_is_reached_in_any_way(way, backend, path):
    import platform

    call = {"x86_64": 41, "aarch64": 198}[platform.machine()]
    assert "in" not in await output(backend, f"PATH, CALL = {path!r}, {call}\n{WAYS[way]}")


async def test_no_family_of_sockets_can_be_made(backend):
    code = (
        "import socket\n"
        f"for name in {FAMILIES}:\n    for kind in (1, 2, 3, 5):\n        try:\n"
        "            socket.socket(getattr(socket, name), kind)\n            print(name, kind)\n"
        "        except (OSError, AttributeError):\n            pass"
    )
    assert await output(backend, code) == ""


async def test_what_harmless_programs_use_still_works(backend):
    code = (
        "import asyncio, multiprocessing.pool, socket, subprocess, sys\n"
        "a, b = socket.socketpair()\na.send(b'x')\nassert b.recv(1) == b'x'\n"
        "async def main():\n    await asyncio.sleep(0)\n    return 1\nassert asyncio.run(main()) == 1\n"
        "print(subprocess.run([sys.executable, '-c', 'print(2)'], capture_output=True, text=True).stdout.strip())"
    )
    assert await output(backend, code) == "2\n"
