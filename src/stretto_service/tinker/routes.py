"""The training half of the Tinker API: sessions, models, passes, steps, saved weights, futures.

Routes and fields are those of the client's version 0.38; docs/tinker.md lists the differences. A request that changes a
model has the model's id and a number, and is answered at once with a future.
"""

from __future__ import annotations

import time
from uuid import uuid4

import msgspec
from aiohttp import web

from stretto.transports.engine.api import Refusal
from stretto_service.access import User
from stretto_service.futures import Future
from stretto_service.hub import USER, Routes, answer, read
from stretto_service.requests import bodies, protobuf
from stretto_service.store import Run, Session
from stretto_service.wires.operations import TenantSpec

POLL_S = 20.0
"""Longest wait for a future in one request."""
ALPHA = 32.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "experts", "fc1_latent_proj", "fc2_latent_proj")
PROTOBUF = "application/x-protobuf"
NOTICE = (
    "adapters of this service stand beside attention and MLP layers; train_unembed has no effect (weights info says so)"
)
NOTICE_FULL = "this service trains all weights of one run at a time; rank, seed and train_* have no effect"


class TinkerRoutes(Routes):
    """Sessions, training and futures."""

    def routes(self) -> list[web.RouteDef]:
        post = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "forward": self.forward_backward,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_weights,
            "save_weights_external": self.save_weights,
            "load_weights": self.load_weights,
            "unload_model": self.unload_model,
            "retrieve_future": self.retrieve_future,
            "cancel_future": self.cancel_future,
            "create_custom_loss": self.create_custom_loss,
        }
        found = [web.post(f"/api/v1/{path}", handler) for path, handler in post.items()]
        return [*found, web.get("/api/v1/healthz", self.healthz), web.get("/health", self.healthz)]

    # -- the service and its sessions --

    async def healthz(self, _: web.Request) -> web.Response:
        if not self.hub.training.is_ready:
            raise Refusal("the trainer is not ready yet", 503)
        return answer({"status": "ok"})

    async def client_config(self, http: web.Request) -> web.Response:
        await read(http, bodies.ClientConfigBody)
        return answer(
            {
                "pjwt_auth_enabled": False,
                "credential_default_source": "api_key",
                "parallel_fwdbwd_chunks": True,
                "proto_compress_fwdbwd": False,
                "fwdbwd_max_chunk_len": 1024,
                "fwdbwd_max_chunk_bytes_count": 5_000_000,
                "sample_use_retrieve_futures": False,
                "custom_loss_server_side": False,
                "sample_join_sampling_session": True,
                "use_pyqwest_transport": False,
            }
        )

    async def dynamic_config(self, http: web.Request) -> web.Response:
        await read(http, bodies.ClientConfigBody)
        return answer({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def create_session(self, http: web.Request) -> web.Response:
        body, now = await read(http, bodies.CreateSessionBody), time.time()
        session = Session(
            id=uuid4().hex,
            owner=http[USER].name,
            created_at=now,
            last_seen_at=now,
            tags=body.tags,
            user_metadata=body.user_metadata or {},
            display_name=body.display_name,
            project=body.project_id or "",
        )
        self.hub.check_room(session)
        self.hub.store.put(session)
        notice = NOTICE_FULL if self.hub.cfg.service.full_finetuning else NOTICE
        return answer({"type": "create_session", "session_id": session.id, "info_message": notice})

    async def heartbeat(self, http: web.Request) -> web.Response:
        body = await read(http, bodies.SessionBody)
        self.hub.session(http[USER], body.session_id).last_seen_at = time.time()
        return answer({"type": "session_heartbeat"})

    async def telemetry(self, http: web.Request) -> web.Response:
        await http.read()  # measurements of the client, which are not kept
        return answer({"status": "accepted"})

    # -- models --

    async def create_model(self, http: web.Request) -> web.Response:
        body = await read(http, bodies.CreateModelBody)
        self.hub.check_model(body.base_model)
        if body.lora_config is None and not self.hub.cfg.service.full_finetuning:
            raise Refusal(
                "lora_config is missing: runs share the weights of one model, and each trains an adapter; full "
                "fine-tuning needs a service with service.full_finetuning"
            )
        check_optimizer(body.optimizer_config)
        return self._create(http[USER], body.session_id, body.model_seq_id, self._spec(body), body.user_metadata)

    def _spec(self, body: bodies.CreateModelBody) -> TenantSpec:
        lora = body.lora_config
        if self.hub.cfg.service.full_finetuning:
            return TenantSpec(name="", rank=0)  # the requested adapter is ignored
        assert lora is not None, "checked"
        largest = self.hub.cfg.service.max_lora_rank
        if not 0 < lora.rank <= largest:
            raise Refusal(f"lora_config.rank = {lora.rank} must be 1 to {largest} (service.max_lora_rank)")
        if not (lora.train_attn or lora.train_mlp):
            raise Refusal("lora_config: train_attn or train_mlp must be true; there are no adapters of embeddings")
        seed = uuid4().int % (1 << 31) if lora.seed is None else lora.seed % (1 << 63)
        targets = (*(ATTENTION if lora.train_attn else ()), *(MLP if lora.train_mlp else ()))
        return TenantSpec(name="", rank=lora.rank, alpha=ALPHA, target_modules=targets, seed=seed)

    def _create(
        self,
        user: User,
        session_id: str,
        model_seq_id: int,
        spec: TenantSpec,
        metadata: dict | None,
        *,
        start: str | None = None,
        with_optimizer: bool = False,
    ) -> web.Response:
        """Make a run; the same request sent again gets the same run."""
        session = self.hub.session(user, session_id)
        session.last_seen_at = time.time()
        name = f"{session.id}:train:{model_seq_id}"
        run = self.hub.store.get(Run, name)
        if run is None:
            run = self.hub.new_run(
                user,
                name,
                msgspec.structs.replace(spec, name=name.replace(":", ".")),
                session=session.id,
                user_metadata=metadata or {},
                start=start,
                start_optimizer=with_optimizer,
            )
            self.hub.training.create(run)
        return _promise(self.hub.training.created(run), name)

    async def get_info(self, http: web.Request) -> web.Response:
        run = self.hub.run(http[USER], (await read(http, bodies.ModelBody)).model_id)
        data = {"arch": None, "model_name": run.base_model, "tokenizer_id": self.hub.tokenizer_id}
        return answer(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": run.id,
                "is_lora": run.spec.rank > 0,
                "lora_rank": run.spec.rank or None,
                "model_name": run.base_model,
            }
        )

    async def forward_backward(self, http: web.Request) -> web.Response:
        if http.content_type != PROTOBUF:
            raise Refusal(f"Content-Type: {http.content_type!r}; this route takes {PROTOBUF}", 415)
        body = await http.read()
        model_id, seq_id = protobuf.read_head(body)
        return await self._submit(http[USER], model_id, "pass", seq_id, body)

    async def optim_step(self, http: web.Request) -> web.Response:
        body = await read(http, bodies.OptimStepBody)
        return await self._submit(http[USER], body.model_id, "optim_step", body.seq_id, await http.read())

    async def save_weights(self, http: web.Request) -> web.Response:
        """All three routes that save weights."""
        body, kind = await read(http, bodies.SaveBody), http.path.rpartition("/")[2]
        if kind == "save_weights_for_sampler" and body.path is None and body.sampling_session_seq_id is None:
            raise Refusal("path or sampling_session_seq_id: one is needed")
        if kind == "save_weights_external" and body.age_encryption_recipients:
            raise Refusal("age_encryption_recipients: this service does not encrypt; leave it out")
        if kind == "save_weights_external" and body.path is None:
            raise Refusal("path: a name is needed")
        return await self._submit(http[USER], body.model_id, kind, body.seq_id, await http.read())

    async def load_weights(self, http: web.Request) -> web.Response:
        body, user = await read(http, bodies.LoadBody), http[USER]
        if body.weights_access_token is not None:
            raise Refusal("weights_access_token: checkpoints of others are read when they are published")
        found = self.hub.checkpoint(user, body.path, "training")
        if body.model_id is not None:
            if body.seq_id is None:
                raise Refusal("seq_id is missing")
            return await self._submit(user, body.model_id, "load_weights", body.seq_id, await http.read())
        if body.session_id is None or body.model_seq_id is None:
            raise Refusal("model_id, or session_id and model_seq_id: one is needed")
        self.hub.check_model(body.base_model)
        check_optimizer(body.optimizer_config)
        saved = self.hub.store.get(Run, found.run)
        assert saved is not None, f"{found.path} has no run"
        return self._create(
            user,
            body.session_id,
            body.model_seq_id,
            saved.spec,
            body.user_metadata,
            start=found.directory,
            with_optimizer=body.optimizer,
        )

    async def unload_model(self, http: web.Request) -> web.Response:
        run = self.hub.run(http[USER], (await read(http, bodies.ModelBody)).model_id)
        return _promise(self.hub.training.end(run), run.id)

    async def _submit(self, user: User, model_id: str, kind: str, seq: int, body: bytes) -> web.Response:
        run = self.hub.run(user, model_id)
        return _promise(await self.hub.training.receive(run, kind, seq, body), run.id)

    # -- futures --

    async def retrieve_future(self, http: web.Request) -> web.Response:
        body, user = await read(http, bodies.FutureBody), http[USER]
        future = self.hub.futures.of(body.request_id, user.name, is_admin=user.is_admin)
        result = await self.hub.futures.wait(future, POLL_S)
        if result is None:
            waits = {"type": "try_again", "request_id": future.id, "queue_state": "active"}
            return answer(waits | self._queue_state(future), 408)
        if result.error is None and result.is_protobuf:
            return web.Response(body=result.body, content_type=PROTOBUF)
        return answer(result.json())

    def _queue_state(self, future: Future) -> dict[str, str]:
        """The reason of the wait, if it is known."""
        if future.run is not None and not self.hub.training.is_ready:
            return {"queue_state": "paused_capacity", "queue_state_reason": "the trainer is starting"}
        return {}

    async def cancel_future(self, http: web.Request) -> web.Response:
        body, user = await read(http, bodies.FutureBody), http[USER]
        future = self.hub.futures.of(body.request_id, user.name, is_admin=user.is_admin)
        if future.cancel is None:
            raise Refusal("only samples can be cancelled; the requests of a model are computed in order")
        future.cancel()
        return answer({})

    async def create_custom_loss(self, http: web.Request) -> web.Response:
        raise Refusal("custom losses run in the client: this service's client config says so", 400)


def check_optimizer(config: dict | None) -> None:
    """Raises: Refusal for another optimizer than AdamW."""
    if config is not None and config.get("type", "adamw") != "adamw":
        raise Refusal(f"optimizer_config: {config.get('type')!r} is not supported; this service has adamw")


def _promise(future: Future, model_id: str) -> web.Response:
    """The answer to a request that is computed later."""
    return answer({"request_id": future.id, "model_id": model_id})
