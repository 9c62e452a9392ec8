"""A reward model behind vLLM's route /classify: conversations in, one number each out.

A directory for sequence classification with one label is served by this file and not by an engine: a score is one
forward pass, without a cache or sampling. What waits when a pass ends is computed together in the next one, packed, up
to max_num_batched_tokens; so the score of a conversation does not depend on its neighbours. The conversation is
rendered as `sft` renders it for training: by the chat template, without the beginning of another reply.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from aiohttp import web

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.runtime import freeze_objects
from stretto.chat.render import Renderer, build_renderer
from stretto.chat.tokenizer import load_tokenizer
from stretto.config.sections.engines import ADMITTED
from stretto.inference.bodies import check_messages
from stretto.inference.boundary import build_app, json_response, max_body_bytes, read_body
from stretto.inference.limits import unknown_token
from stretto.inference.server import listen
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.lm_head import head_logits
from stretto.models.value_head import load_value_model
from stretto.transports.engine import api
from stretto.transports.engine.api import Refusal

if TYPE_CHECKING:
    from jaxtyping import Int32

    from stretto.config.root import InferenceConfig

logger = logging.getLogger(__name__)


class ClassifyBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of /classify: a conversation, or `input`, one or several texts or lists of token ids."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    input: str | list[str | int | list[int]] | None = None
    use_activation: bool | None = None
    """None: true, as with vLLM: the score of one label is between 0 and 1, its sigmoid."""
    chat_template_kwargs: dict[str, Any] | None = None
    """`tools` alone."""
    add_generation_prompt: bool = False
    add_special_tokens: bool | None = None
    user: str | None = None


def main(cfg: InferenceConfig, directory: Path) -> int:
    """Serve a reward model until SIGTERM or SIGINT (0), or until it fails (1)."""
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    return asyncio.run(listen(cfg, ScoreServer(cfg, directory)))


class _Waiting(NamedTuple):
    """A text that has not been scored yet."""

    token_ids: np.ndarray
    score: asyncio.Future[float]


class ScoreServer:
    """The routes over one reward model, which is None until it is loaded."""

    def __init__(self, cfg: InferenceConfig, directory: Path) -> None:
        self.cfg, self.directory = cfg, directory
        self.model: Decoder | None = None
        self.failure: BaseException | None = None
        assert cfg.model is not None, "its files have been read"
        self.model_name = cfg.served_model_name or cfg.model
        if cfg.engine == "vllm":
            raise ConfigError(
                f'{cfg.model} is a reward model, which inference.engine = "vllm" does not start; leave the key out, or '
                f"start `vllm serve {cfg.model}` yourself and give its address as base_url"
            )
        self._renderer: Renderer
        self._queue: list[_Waiting] = []
        self._has_work = asyncio.Event()
        self._num_scored, self._num_passes = 0, 0

    @property
    def is_loaded(self) -> bool:
        return self.model is not None

    def close(self) -> None:
        """Say what was done; there is nothing to end."""
        logger.info("%d texts were scored in %d passes", self._num_scored, self._num_passes)

    def app(self) -> web.Application:
        app = build_app(self.cfg.key, self.cfg.server.max_open_bytes)
        get = {
            api.HEALTH: self.health,
            api.LIVENESS: self.liveness,
            ADMITTED: self.health,
            api.MODELS: self.models,
            api.METRICS: self.metrics,
        }
        app.router.add_routes([web.get(path, handler) for path, handler in get.items()])
        app.router.add_post(api.CLASSIFY, self.classify)
        return app

    # -- routes --

    async def health(self, _: web.Request) -> web.Response:
        if self.failure is not None:
            raise Refusal("scoring has failed; the log says why", 500)
        self._ready()
        return web.Response()

    async def liveness(self, _: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        self._ready()
        card = {
            "id": self.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "stretto",
            "root": self.model_name,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        return json_response({"object": "list", "data": [card]})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"stretto:scored_texts_total {self._num_scored}\n")

    async def classify(self, http: web.Request) -> web.Response:
        self._ready()
        limit = max_body_bytes(self.max_model_len, self._renderer.tokenizer.max_token_bytes)
        body = api.decode_json(await read_body(http, limit), ClassifyBody)
        if body.model not in (None, self.model_name):
            raise Refusal(f"the model {body.model!r} does not exist; this server has {self.model_name!r}", 404)
        texts = await asyncio.to_thread(self._texts_of, body)
        scores = await asyncio.gather(*map(self.score, texts))
        if body.use_activation is not False:
            scores = [1 / (1 + math.exp(-each)) if each > -700 else 0.0 for each in scores]
        num_tokens = sum(map(len, texts))
        return json_response(
            {
                "id": f"classify-{self._num_scored}",
                "object": "list",
                "created": int(time.time()),
                "model": self.model_name,
                "data": [{"index": i, "label": None, "probs": [s], "num_classes": 1} for i, s in enumerate(scores)],
                "usage": {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens},
            }
        )

    def _ready(self) -> Decoder:
        if self.model is None:
            raise Refusal("the model is being loaded; wait until /health answers 200", 503)
        return self.model

    def _texts_of(self, body: ClassifyBody) -> list[np.ndarray]:
        """The tokens, int32, of every text of a request."""
        if (body.messages is None) == (body.input is None):
            raise Refusal("give either `messages` or `input`")
        if body.messages is not None:
            texts = [self._rendered(body.messages, body)]
        else:
            given = body.input
            is_one = isinstance(given, str) or all(isinstance(each, int) for each in given or ())
            adds = body.add_special_tokens is not False
            encode = lambda text: self._renderer.tokenizer.encode(text, add_special_tokens=adds)
            parts: list[Any] = [given] if is_one else list(given or ())
            if any(isinstance(each, int) for each in parts):
                raise Refusal("input: send one text, one list of token ids, or a list of texts or of such lists")
            texts = [api.token_array(encode(p) if isinstance(p, str) else p, "input") for p in parts]
        vocab_size = self._ready().config.vocab_size
        for ids in texts:
            if not 0 < len(ids) <= self.max_model_len:
                raise Refusal(f"a text has {len(ids)} tokens, and this model reads 1 to {self.max_model_len}")
            if len(bad := ids[(ids < 0) | (ids >= vocab_size)]):
                raise Refusal(unknown_token("input", int(bad[0]), vocab_size))
        return texts

    def _rendered(self, messages: list[dict[str, Any]], body: ClassifyBody) -> np.ndarray:
        check_messages(messages)
        settings = dict(body.chat_template_kwargs or {})
        tools = settings.pop("tools", None)
        if settings or body.add_generation_prompt:
            named = ", ".join(settings) or "add_generation_prompt"
            raise Refusal(f"{named}: a conversation is scored as it was trained; leave it out")
        try:
            return self._renderer.render_leading(messages, tools)
        except Exception as error:  # templates are third-party code and may raise anything
            reason = str(error) if isinstance(error, StrettoError) else repr(error)
            raise Refusal(f"messages: {self._renderer.name} refuses them: {reason}") from error

    # -- scores --

    async def score(self, token_ids: Int32[np.ndarray, " tokens"]) -> float:
        """The score at the end of a text."""
        waiting = _Waiting(token_ids, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._has_work.set()
        return await waiting.score

    async def run(self) -> None:
        """Load the model, then score what waits, as long as this task lives."""
        started, loop = time.perf_counter(), asyncio.get_running_loop()
        self.model = await loop.run_in_executor(None, self._load)
        freeze_objects()
        address, seconds = f"{self.cfg.server.host}:{self.cfg.server.port}", time.perf_counter() - started
        logger.info("ready on http://%s in %.1f s: the reward model %s", address, seconds, self.model_name)
        while True:
            await self._has_work.wait()
            batch = self._next_batch()
            if not batch:
                self._has_work.clear()
                continue
            scores = await loop.run_in_executor(None, score_texts, self.model, [each.token_ids for each in batch])
            self._num_scored, self._num_passes = self._num_scored + len(batch), self._num_passes + 1
            for each, score in zip(batch, scores):
                if not each.score.done():
                    each.score.set_result(score)

    def _next_batch(self) -> list[_Waiting]:
        """What is scored next: the first that still wait, as many as fit."""
        self._queue = [each for each in self._queue if not each.score.done()]
        count, num_tokens = 0, 0
        for each in self._queue:
            num_tokens += len(each.token_ids)
            if count and num_tokens > self.cfg.max_num_batched_tokens:
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        return batch

    def _load(self) -> Decoder:
        """The model, and what renders conversations for it.

        Raises: ConfigError for a family that stretto does not compute itself, or several labels.
        """
        device = self.cfg.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if not hub.has_custom_module(self.directory):
            raise ConfigError(
                f"{self.directory} is a reward model of a family that stretto does not compute itself; start "
                f"`vllm serve {self.directory}` and give its address as base_url"
            )
        dtype = hub.dtype_of(self.cfg.dtype, device)
        model = load_value_model(self.directory, dtype=dtype, device=torch.device(device))
        self.max_model_len = self.cfg.max_model_len or model.config.hf.get("max_position_embeddings") or 32768
        self._renderer = build_renderer(load_tokenizer(self.directory), None, model.config.hf.get("model_type"))
        logger.info("conversations are rendered by %s", self._renderer.description)
        return model.requires_grad_(False)


@torch.inference_mode()
def score_texts(model: Decoder, texts: list[Int32[np.ndarray, " tokens"]]) -> list[float]:
    """The score at the end of each text (int32 tokens), in one pass."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # equal lengths share a call of attention
    bounds = np.cumsum([0, *(len(texts[i]) for i in order)])
    device = model.output_weight.device
    ids = torch.from_numpy(np.concatenate([texts[i] for i in order]).astype(np.int64)).to(device)
    ends = torch.from_numpy(bounds[1:] - 1).to(device)
    hidden = model.hidden(ids, PackedLayout(tuple(bounds.tolist()), device), ends)
    found = head_logits(hidden, model.output_weight).squeeze(1).tolist()
    scores = [0.0] * len(texts)
    for i, score in zip(order, found):
        scores[i] = score
    return scores
