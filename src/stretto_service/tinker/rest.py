"""Listings, checkpoints and sessions of the Tinker API; users see their own records, the admin those of all users."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import msgspec
from aiohttp import web

from stretto.transports.engine.api import Refusal
from stretto_service.hub import USER, Hub, Routes, answer, page, read, texts, when
from stretto_service.requests import bodies
from stretto_service.store import SEGMENTS, Checkpoint, Run, Sampler, Session
from stretto_service.training.checkpoints import LINK_S, TRACES

_CHECKPOINT = "/api/v1/training_runs/{run}/checkpoints/{checkpoint:[^/]+/[^/]+}"


class RestRoutes(Routes):
    """Listings, checkpoints and sessions. key: signs addresses of files."""

    def __init__(self, hub: Hub, key: bytes) -> None:
        super().__init__(hub)
        self._key = key

    def routes(self) -> list[web.RouteDef]:
        runs = "/api/v1/training_runs"
        return [
            web.get("/api/v1/get_server_capabilities", self.capabilities),
            web.get(runs, self.training_runs),
            web.get(runs + "/{run}", self.training_run),
            web.get(runs + "/{run}/checkpoints", self.checkpoints),
            web.get("/api/v1/checkpoints", self.user_checkpoints),
            web.delete(_CHECKPOINT, self.delete_checkpoint),
            web.post(_CHECKPOINT + "/publish", self.publish),
            web.delete(_CHECKPOINT + "/publish", self.publish),
            web.put(_CHECKPOINT + "/ttl", self.ttl),
            web.get(_CHECKPOINT + "/external_weights_urls", self.urls),
            web.get("/download/{token}/{path:.+}", self.download),
            web.post("/api/v1/weights_info", self.weights_info),
            web.post("/api/v1/copy_weights", self.copy_weights),
            web.get("/api/v1/sessions", self.sessions),
            web.post("/api/v1/sessions/search", self.search_sessions),
            web.get("/api/v1/sessions/{session}", self.session),
            web.post("/api/v1/sessions/{session}/finish", self.finish_session),
            web.get("/api/v1/sessions/{session}/trace_export", self.trace_export),
            web.put("/api/v1/sessions/{session}/project", self.assign_project),
            web.get("/api/v1/samplers/{sampler:.+}", self.sampler),
        ]

    async def capabilities(self, _: web.Request) -> web.Response:
        model = {
            "model_name": self.hub.model_name,
            "max_context_length": min(self.hub.max_model_len, self.hub.cfg.seq_len - 1),
            "trainable": True,
            "sampleable": True,
        }
        return answer({"supported_models": [model]})

    # -- runs and checkpoints --

    def _checkpoints_of(self, run: Run) -> list[Checkpoint]:
        now = time.time()
        return [
            each
            for each in self.hub.store.all(Checkpoint)
            if each.run == run.id and (each.expires_at is None or each.expires_at > now)
        ][::-1]

    async def training_runs(self, http: web.Request) -> web.Response:
        offset, limit = page(http)
        found, project = self.hub.records_of(Run, http[USER]), http.query.get("project_id")
        if project is not None:
            own = {each.id for each in self.hub.records_of(Session, http[USER]) if each.project == project}
            found = [run for run in found if run.session in own]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        shown = [self._run(run) for run in found[offset : offset + limit]]
        return answer({"training_runs": shown, "cursor": cursor})

    async def training_run(self, http: web.Request) -> web.Response:
        return answer(self._run(self.hub.run(http[USER], http.match_info["run"])))

    def _run(self, run: Run) -> dict[str, Any]:
        checkpoints = self._checkpoints_of(run)
        newest = lambda kind: next((_checkpoint(each) for each in checkpoints if each.kind == kind), None)
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": run.owner,
            "is_lora": run.spec.rank > 0,
            "corrupted": run.state == "failed",
            "lora_rank": run.spec.rank or None,
            "last_request_time": when(run.last_request_at or run.created_at),
            "last_checkpoint": newest("training"),
            "last_sampler_checkpoint": newest("sampler"),
            "user_metadata": texts(run.user_metadata),
        }

    async def checkpoints(self, http: web.Request) -> web.Response:
        run = self.hub.run(http[USER], http.match_info["run"])
        return answer({"checkpoints": [_checkpoint(each) for each in self._checkpoints_of(run)]})

    async def user_checkpoints(self, http: web.Request) -> web.Response:
        offset, limit = page(http, 100)
        found = self.hub.records_of(Checkpoint, http[USER])
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        shown = [_checkpoint(each) for each in found[offset : offset + limit]]
        return answer({"checkpoints": shown, "cursor": cursor})

    def _own(self, http: web.Request) -> Checkpoint:
        """The checkpoint in an address. Raises: Refusal 404, 403 if it is another user's."""
        path = f"tinker://{http.match_info['run']}/{http.match_info['checkpoint']}"
        found = self.hub.checkpoint(http[USER], path)
        if not http[USER].may_access(found.owner):
            raise Refusal(f"{path} belongs to another user", 403)
        return found

    async def delete_checkpoint(self, http: web.Request) -> web.Response:
        await self.hub.checkpoints.delete(self._own(http))
        return web.Response(status=204)

    async def publish(self, http: web.Request) -> web.Response:
        found = self._own(http)
        found.is_public = http.method == "POST"
        self.hub.store.put(found)
        return web.Response(status=204)

    async def ttl(self, http: web.Request) -> web.Response:
        found, body = self._own(http), await read(http, bodies.TtlBody)
        found.expires_at = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        self.hub.store.put(found)
        return web.Response(status=204)

    async def weights_info(self, http: web.Request) -> web.Response:
        path = (await read(http, bodies.PathBody)).tinker_path
        run = self.hub.store.get(Run, self.hub.checkpoint(http[USER], path).run)
        assert run is not None, f"{path} has no run"
        targets, is_full = run.spec.target_modules or (), run.spec.rank == 0
        return answer(
            {
                "base_model": run.base_model,
                "is_lora": run.spec.rank > 0,
                "lora_rank": run.spec.rank or None,
                "train_unembed": is_full,
                "train_mlp": is_full or "up_proj" in targets,
                "train_attn": is_full or "q_proj" in targets,
            }
        )

    async def copy_weights(self, http: web.Request) -> web.Response:
        """Copy a checkpoint into a new run of this user."""
        body, user = await read(http, CopyBody), http[USER]
        if body.weights_access_token is not None:
            raise Refusal("weights_access_token: checkpoints of others are read when they are published")
        found = self.hub.checkpoint(user, body.source_path)
        origin = self.hub.store.get(Run, found.run)
        assert origin is not None, f"{found.path} has no run"
        if body.session_id is not None:
            self.hub.session(user, body.session_id)
        number = uuid4().hex if body.model_seq_id is None else body.model_seq_id
        name = f"{body.session_id or uuid4().hex}:copy:{number}"
        if (known := self.hub.store.get(Run, name)) is not None:  # the same request sent again
            path = self.hub.checkpoints.path_of(known, found.kind, found.name)
            return answer({"tinker_path": self.hub.checkpoint(user, path).path})
        self.hub.checkpoints.check_room(user.name, found.size_bytes)
        spec = msgspec.structs.replace(origin.spec, name=name.replace(":", "."))
        directory = self.hub.checkpoints.directory / spec.name / SEGMENTS[found.kind] / found.name
        try:
            await asyncio.to_thread(shutil.copytree, found.directory, directory, dirs_exist_ok=True)
            is_complete = self.hub.store.get(Checkpoint, found.path) is found
        except (OSError, shutil.Error):
            if Path(found.directory).is_dir():
                raise
            is_complete = False
        if not is_complete:
            await asyncio.to_thread(shutil.rmtree, directory.parent.parent, ignore_errors=True)
            raise Refusal(f"{found.path}: these weights were deleted, or saved over, before they were copied", 404)
        now = time.time()
        run = Run(id=name, owner=user.name, spec=spec, base_model=origin.base_model, created_at=now, state="ended")
        self.hub.store.put(run)
        path = self.hub.checkpoints.path_of(run, found.kind, found.name)
        expires = None if body.ttl_seconds is None else now + body.ttl_seconds
        copy = msgspec.structs.replace(
            found, path=path, run=name, owner=user.name, directory=str(directory), created_at=now,
            expires_at=expires, is_public=False,
        )  # fmt: skip
        self.hub.store.put(copy)
        return answer({"tinker_path": path})

    # -- files --

    async def urls(self, http: web.Request) -> web.Response:
        """A signed address per file of exported weights."""
        found, expires = self._own(http), int(time.time() + LINK_S)
        root = Path(found.directory)
        links = {}
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            name = file.relative_to(self.hub.checkpoints.directory).as_posix()
            links[file.relative_to(root).as_posix()] = self._link(http, name, expires)
        return answer({"urls": links, "expires": when(expires)})

    def _link(self, http: web.Request, name: str, expires: int) -> str:
        base = self.hub.cfg.service.public_url or f"{http.scheme}://{http.host}"
        return f"{base.rstrip('/')}/download/{self._sign(name, expires)}/{quote(name)}"

    def _sign(self, name: str, expires: int) -> str:
        digest = hmac.digest(self._key, f"{expires} {name}".encode(), hashlib.sha256).hex()
        return f"{expires}-{digest}"

    async def download(self, http: web.Request) -> web.StreamResponse:
        """A file whose address is signed."""
        name = http.match_info["path"]
        token = http.match_info["token"][:100].encode(errors="surrogateescape")
        expires = token.partition(b"-")[0][:12]
        is_current = expires.isdigit() and int(expires) > time.time()
        if not is_current or not hmac.compare_digest(self._sign(name, int(expires)).encode(), token):
            raise Refusal("this address is not valid (any more); ask for a new one", 403)
        path = self.hub.checkpoints.directory / name
        if not path.is_file():
            raise Refusal(f"{name}: this file was deleted", 404)
        return web.FileResponse(path)

    # -- sessions and samplers --

    async def sessions(self, http: web.Request) -> web.Response:
        offset, limit = page(http)
        found = self.hub.records_of(Session, http[USER])
        return answer({"sessions": [session.id for session in found[offset : offset + limit]]})

    async def session(self, http: web.Request) -> web.Response:
        session = self.hub.session(http[USER], http.match_info["session"])
        return answer(
            {
                "training_run_ids": [r.id for r in self.hub.store.all(Run) if r.session == session.id],
                "sampler_ids": [s.id for s in self.hub.store.all(Sampler) if s.session == session.id],
                "user_metadata": texts(session.user_metadata),
                "display_name": session.display_name,
            }
        )

    async def trace_export(self, http: web.Request) -> web.Response:
        """Export a session with its runs, its checkpoints, and the audit log of its user since its start."""
        hub, session = self.hub, self.hub.session(http[USER], http.match_info["session"])
        runs = [run for run in hub.store.all(Run) if run.session == session.id]
        names = {run.id for run in runs}
        trace = {
            "session": session,
            "training_runs": runs,
            "checkpoints": [each for each in hub.store.all(Checkpoint) if each.run in names],
            "audit": [entry for entry in hub.audit.read(session.owner) if entry["time"] >= session.created_at],
        }
        name, expires = f"{TRACES}/{session.owner}/{session.id}.json", int(time.time() + LINK_S)
        path = hub.checkpoints.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(trace))
        hub.checkpoints.sweep_traces()
        return answer({"status": "ready", "url": self._link(http, name, expires)})

    async def assign_project(self, http: web.Request) -> web.Response:
        """Label a session with a project, which changes no rights."""
        session = self.hub.session(http[USER], http.match_info["session"])
        session.project = (await read(http, ProjectBody)).project_id
        self.hub.store.put(session)
        return answer({})

    async def finish_session(self, http: web.Request) -> web.Response:
        """Evict the runs of a session whose client has ended."""
        session = self.hub.session(http[USER], http.match_info["session"])
        body = await read(http, bodies.FinishBody)
        session.finished = str(body.reason.get("type", "success"))[:100]
        self.hub.store.put(session)
        for run in self.hub.store.all(Run):
            if run.session == session.id and run.state == "active":
                self.hub.training.evict(run, "its session has ended")
        return web.Response(status=204)

    async def search_sessions(self, http: web.Request) -> web.Response:
        body, found = await read(http, dict), []
        limit, metadata = body.get("limit", 50), body.get("user_metadata") or {}
        if not isinstance(limit, int) or limit < 0 or not isinstance(metadata, dict):
            raise Refusal("limit must be a number from 0, user_metadata an object")
        for session in self.hub.records_of(Session, http[USER]):
            names = {"session_id": session.id, "display_name": session.display_name}
            has_names = all(body.get(key) in (None, value) for key, value in names.items())
            own = texts(session.user_metadata) or {}
            if has_names and all(own.get(key) == value for key, value in metadata.items()):
                found.append(session)
        counts: dict[str | None, int] = defaultdict(int)
        for checkpoint in self.hub.store.all(Checkpoint):
            run = self.hub.store.get(Run, checkpoint.run)
            counts[run.session if run is not None else None] += 1
        shown = [
            {
                "session_id": session.id,
                "created_at": when(session.created_at),
                "owner": session.owner,
                "project_id": session.project,
                "status": {"type": "active"}
                if session.finished is None
                else {"type": "client_finished", "reason": {"type": session.finished}},
                "checkpoints_count": counts[session.id],
                "display_name": session.display_name,
                "user_metadata": texts(session.user_metadata),
            }
            for session in found[:limit]
        ]
        return answer({"sessions": shown, "next_cursor": None})

    async def sampler(self, http: web.Request) -> web.Response:
        found = self.hub.sampler(http[USER], http.match_info["sampler"])
        return answer({"sampler_id": found.id, "base_model": found.base_model, "model_path": found.model_path})


class ProjectBody(bodies.Body, frozen=True):
    project_id: bodies.Label


class CopyBody(bodies.Body, frozen=True):
    source_path: str
    session_id: str | None = None
    model_seq_id: bodies.Number | None = None
    destination_project_id: str | None = None
    ttl_seconds: bodies.Seconds | None = None
    weights_access_token: str | None = None


def _checkpoint(found: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{SEGMENTS[found.kind]}/{found.name}",
        "checkpoint_type": found.kind,
        "time": when(found.created_at),
        "tinker_path": found.path,
        "size_bytes": found.size_bytes,
        "public": found.is_public,
        "expires_at": when(found.expires_at),
        "user_metadata": found.user_metadata,
    }
