"""A server that gives every request one answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def served(
    status: int = 200, body: bytes = b'{"data": [{"id": "large"}]}', delay_s: float = 0.0, alias: str | None = None
) -> Iterator[str]:
    """The address of a server that gives every request this answer, and 401 to a wrong key.

    alias: a model that it has, and does not list.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_known = self.path == "/v1/chat/completions" and asked["model"] == alias and asked["max_tokens"] == 1
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(b'{"choices": [{}]}' if is_known else b"{}")

        def do_GET(self) -> None:
            time.sleep(delay_s)
            is_refused = self.headers.get("Authorization", "Bearer right") != "Bearer right"
            self.send_response(401 if is_refused else status)
            self.end_headers()
            with suppress(BrokenPipeError):  # whoever asked may have gone
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
