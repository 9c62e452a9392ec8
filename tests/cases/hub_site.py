"""A small server that speaks the part of the Hub's HTTP API which downloads and uploads use, over directories.

`ROOT/datasets/ORG/NAME` and `ROOT/models/ORG/NAME` are the repositories. There is one revision, whose commit changes
with each upload. Files of `.safetensors` are uploaded as large files, in two requests of their own; others are in the
commit.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_this_test"


class HubSite(ThreadingHTTPServer):
    """The server; `requests` are those that it got, as `METHOD PATH`."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.num_commits = root, 0
        self.requests: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.gated: set[str] = set()
        """Models that need a login with access."""
        self.num_breaks: dict[str, int] = {}
        """Files that are sent by halves this many times, and the connection is closed."""
        self.ranges: list[str] = []
        """Ranges that were asked for."""
        self.status: int | None = None
        """What every request is refused with."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def commit(self) -> str:
        return hashlib.sha1(str(self.num_commits).encode()).hexdigest()


@contextlib.contextmanager
def open_hub(root: Path) -> Iterator[HubSite]:
    """The server over these repositories, until the block ends."""
    site = HubSite(root)
    thread = threading.Thread(target=site.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield site
    finally:
        site.shutdown()
        thread.join()
        site.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubSite
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        words = path.strip("/").split("/")
        if self.server.status is not None:
            return self._refuse(self.server.status, "Refused")
        if words[0] == "api":
            self._answer_api(words[1:], body)
        elif "resolve" in words:
            self._send_file(words)
        elif words[-3:] == ["lfs", "objects", "batch"]:
            self._open_uploads(json.loads(body))
        elif words[0] == "store":
            self.server.stored[words[1]] = body
            self._send(b"")
        else:
            self._refuse(404, "EntryNotFound")

    # -- what is asked --

    def _answer_api(self, words: list[str], body: bytes) -> None:
        if words == ["repos", "create"]:
            return self._create(json.loads(body))
        if words == ["whoami-v2"]:
            return self._whoami()
        if words == ["validate-yaml"]:
            return self._validate(json.loads(body)["content"])
        kind, repo = words[0], self.server.root / "/".join(words[:3])
        if not repo.is_dir():
            return self._refuse(404, "RepoNotFound")
        match words[3:]:
            case [] | ["revision", _]:
                files = [{"rfilename": e["path"], "size": e["size"], "blobId": e["oid"]} for e in _entries(repo)]
                name = "/".join(words[1:3])
                about = {"id": name, "sha": self.server.commit, "gated": "auto" if self._is_kept(name) else False}
                self._send_json(about | {"siblings": files})
            case ["auth-check"]:
                if self._is_kept("/".join(words[1:3])):
                    return self._refuse(403, "GatedRepo")
                self._send_json({})
            case ["tree", _, *_]:
                directory = repo / "/".join(words[5:])
                is_whole = "recursive=true" in urlsplit(self.path).query.lower()
                self._send_json(_entries(repo) if is_whole else _children(repo, directory))
            case ["paths-info", _]:
                asked = _paths_of(body)
                self._send_json([entry for entry in _entries(repo) if entry["path"] in asked])
            case ["preupload", _]:
                files = json.loads(body)["files"]
                self._send_json(
                    {"files": [{**file, "uploadMode": _mode(file), "shouldIgnore": False} for file in files]}
                )
            case ["commit", _]:
                self._commit(kind, repo, body)
            case _:
                self._refuse(404, "EntryNotFound")

    def _send_file(self, words: list[str]) -> None:
        kind, words = ("datasets", words[1:]) if words[0] == "datasets" else ("models", words)
        repo = self.server.root / kind / "/".join(words[:2])
        file = repo / "/".join(words[4:])
        if not repo.is_dir():
            return self._refuse(404, "RepoNotFound")
        if self._is_kept("/".join(words[:2])):
            return self._refuse(403, "GatedRepo")
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        content = file.read_bytes()
        headers = {"X-Repo-Commit": self.server.commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        status, whole = 200, len(content)
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            content = content[int(first) : int(last) + 1 if last else None]
            status = 206
            self.server.ranges.append(asked)
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(content) - 1}/{whole}"
        is_broken = self.command == "GET" and self.server.num_breaks.get(file.name, 0) > 0
        if is_broken:
            self.server.num_breaks[file.name] -= 1
        self._send(content, status, headers | {"Accept-Ranges": "bytes"}, is_broken=is_broken)

    # -- what is uploaded --

    def _whoami(self) -> None:
        if not self._is_known():
            return self._refuse(401, "Unauthorized")
        self._send_json({"type": "user", "name": "tester", "orgs": []})

    def _validate(self, card: str) -> None:
        import yaml

        metadata = yaml.safe_load(card.split("---\n")[1])
        wrong = [] if isinstance(metadata, dict) else [{"message": "the head of the card is no mapping"}]
        self._send_json({"errors": wrong, "warnings": []})

    def _create(self, asked: dict) -> None:
        if not self._is_known():
            return self._refuse(401, "Unauthorized")
        name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        repo = self.server.root / "models" / name
        if repo.exists():
            return self._refuse(409, "AlreadyExists", {"url": f"{self.server.url}/{name}"})
        repo.mkdir(parents=True)
        self._send_json({"url": f"{self.server.url}/{name}"})

    def _open_uploads(self, asked: dict) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.server.url}/store/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        self._send_json({"transfer": "basic", "objects": objects}, content_type="application/vnd.git-lfs+json")

    def _commit(self, kind: str, repo: Path, body: bytes) -> None:
        if not self._is_known():
            return self._refuse(401, "Unauthorized")
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
                continue
            content = self.server.stored[value["oid"]] if "oid" in value else base64.b64decode(value["content"])
            assert "oid" not in value or hashlib.sha256(content).hexdigest() == value["oid"]
            (repo / value["path"]).parent.mkdir(parents=True, exist_ok=True)
            (repo / value["path"]).write_bytes(content)
        self.server.num_commits += 1
        url = f"{self.server.url}/{repo.parent.name}/{repo.name}"
        self._send_json(
            {"success": True, "commitOid": self.server.commit, "commitUrl": f"{url}/commit/{self.server.commit}"}
        )

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    # -- answers --

    def _refuse(self, status: int, code: str, more: dict | None = None) -> None:
        self._send(
            json.dumps({"error": code} | (more or {})).encode(), status,
            {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"},
        )  # fmt: skip

    def _send_json(self, value: object, *, content_type: str = "application/json") -> None:
        self._send(json.dumps(value).encode(), 200, {"Content-Type": content_type})

    def _is_kept(self, name: str) -> bool:
        return name in self.server.gated and not self._is_known()

    def _send(
        self, content: bytes, status: int = 200, headers: dict[str, str] | None = None, *, is_broken: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if is_broken else content)
            self.close_connection = self.close_connection or is_broken


def _entries(repo: Path) -> list[dict]:
    """The files of a repository as the API lists them."""
    return [
        {
            "type": "file",
            "path": str(file.relative_to(repo)),
            "size": file.stat().st_size,
            "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
        }
        for file in sorted(repo.rglob("*"))
        if file.is_file()
    ]


def _children(repo: Path, directory: Path) -> list[dict]:
    """The files and directories of one directory as the API lists them."""
    below = [each for each in sorted(directory.iterdir()) if each.is_dir()] if directory.is_dir() else []
    folders = [{"type": "directory", "path": str(each.relative_to(repo)), "oid": "0" * 40} for each in below]
    return folders + [entry for entry in _entries(repo) if (repo / entry["path"]).parent == directory]


def _paths_of(body: bytes) -> set[str]:
    from urllib.parse import parse_qs

    try:
        return set(json.loads(body)["paths"])
    except ValueError:
        return set(parse_qs(body.decode())["paths"])


def _mode(file: dict) -> str:
    return "lfs" if file["path"].endswith(".safetensors") else "regular"
