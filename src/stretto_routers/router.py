"""The vllm-router with the engines' key: `python -m stretto_routers.router --worker-urls ...`.

By itself vllm-router requires no key. It passes on the key that a client sends, but to prefill and decode engines it
sends its own, OPENAI_API_KEY, for every client; and every client may change its list of engines. With VLLM_API_KEY in
the environment all routes of this router require that key, /readiness and /add_worker too.

vllm-router sends a key to a URL to check it, and caches the answer for ever. The URL must not be an engine's, which may
not be ready yet: a child process answers, which ends with the router. A thread could not answer, because the router
never releases Python's lock.

Its metrics have a port that is chosen when it starts: by default all routers of a host use the same one, and a port
that the launcher chose could be taken by then.
"""

from __future__ import annotations

import hmac
import os
import signal
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stretto.base.ports import unused_port
from stretto.config.sections.inference import KEY_VAR

ENGINES_KEY_VAR = "OPENAI_API_KEY"
"""Where vllm-router finds the key for prefill and decode engines."""
CHECK_TIMEOUT_S = 5.0
"""How long a connection to the process that checks keys may be silent."""


def main(words: Sequence[str]) -> None:
    """Run vllm-router with its own options until SIGTERM."""
    os.environ.pop(ENGINES_KEY_VAR, None)  # the user's key for another service
    urls = []
    if key := os.environ.get(KEY_VAR):
        os.environ[ENGINES_KEY_VAR] = key
        urls.append(start_key_check(key))
    from vllm_router.launch_router import launch_router, parse_router_args

    args = parse_router_args([*words])
    args.api_key_validation_urls = urls  # an argument of the router that has no option
    if not any(word.startswith("--prometheus-port") for word in words):
        args.prometheus_port = unused_port()
    launch_router(args)


def start_key_check(key: str) -> str:
    """Start a process that answers 200 to requests with this key, else 401; returns its URL.

    It listens on loopback, and ends when this process does.
    """

    class Check(BaseHTTPRequestHandler):
        timeout = CHECK_TIMEOUT_S

        def do_GET(self) -> None:
            header = self.headers.get("Authorization", "").encode("latin-1")  # the bytes as they were sent
            is_right = hmac.compare_digest(header, f"Bearer {key}".encode())
            self.send_response(200 if is_right else 401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Check)
    reader, _writer = os.pipe()
    if os.fork() == 0:
        os.close(_writer)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.read(reader, 1)  # returns when the router, which holds the other end, has ended
        os._exit(0)
    os.close(reader)
    server.server_close()
    return f"http://127.0.0.1:{server.server_address[1]}/"


if __name__ == "__main__":
    main(sys.argv[1:])
