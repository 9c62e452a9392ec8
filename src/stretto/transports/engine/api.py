"""HTTP API of the engine, both directions: routes, bodies of requests, refusals.

The JSON is that of vLLM's `/inference/v1/generate` (0.32), so the same client works with the embedded engine and
vLLM. The server calls `decode_generate`, the client `encode_generate`; completions.py has the answer. A body that does
not fit the schema raises `Refusal`; every route answers with its `body()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import msgspec
import numpy as np

from stretto.base.errors import DataError, EngineError, StrettoError
from stretto.records.generate import NOT_REPLAYED, REPLAYED, GenerateRequest, SamplingParams
from stretto.transports.engine.images import FeaturesBody, decode_features, encode_features

if TYPE_CHECKING:
    from jaxtyping import Int32

GENERATE = "/inference/v1/generate"
MODELS = "/v1/models"
COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
CLASSIFY = "/classify"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
HEALTH = "/health"
LIVENESS = "/liveness"
IDLE = "idle=true"
"""Query of LIVENESS: an engine that still loads weights is not alive; otherwise it is."""
READINESS = "/readiness"
"""A router's route: whether it has accepted an engine."""
ADMIT = "/admit"
"""Whether routers may send an engine requests, `?open=false` or `true`; the answer of /admitted says it to them."""
METRICS = "/metrics"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
START_UPDATE = "/start_weight_update"
UPDATE_WEIGHTS = "/update_weights"
FINISH_UPDATE = "/finish_weight_update"
WORLD_SIZE = "/get_world_size"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
SLEEP = "/sleep"
WAKE_UP = "/wake_up"
IS_SLEEPING = "/is_sleeping"
SLEEP_TAGS = ("weights", "kv_cache")
RESET_PREFIX_CACHE = "/reset_prefix_cache"
ABORT = "/abort"
ABORT_REQUESTS = "/abort_requests"
SESSION_HEADER = "X-Session-ID"
JSON_HEADERS = {"Content-Type": "application/json"}
PAUSE_MODES = ("abort", "wait", "keep")


T = TypeVar("T")
_LONGEST_SALT = 128  # characters


class Refusal(StrettoError):
    """Answers a request with an error: an HTTP status, and a message for its sender."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.kind = HTTPStatus(status).phrase.replace(" ", "").removesuffix("Error") + "Error"

    def body(self) -> bytes:
        return msgspec.json.encode({"error": {"message": str(self), "type": self.kind, "code": self.status}})


class EngineStopping(EngineError):
    """The engine was told to end while this request was running; nothing is wrong with it."""


def sleep_route(level: int) -> str:
    """SLEEP with its query: requests are aborted."""
    return f"{SLEEP}?level={level}&mode=abort"


def pause_mode(query: Mapping[str, str]) -> str:
    """The mode in a query of PAUSE. Raises: Refusal for an unknown one."""
    mode = query.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise Refusal(f"mode: {mode!r} is not one of {', '.join(PAUSE_MODES)}")
    return mode


def metrics_of(text: str) -> dict[str, float]:
    """Metrics in Prometheus' format, summed over labels; those of a `position` also as name/position."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#") and "_bucket" not in line:
            name, _, value = line.rpartition(" ")
            name, _, labels = name.partition("{")
            position = labels.partition('position="')[2].partition('"')[0]
            for key in (name, f"{name}/{position}") if position else (name,):
                with suppress(ValueError):  # a line of another engine's own kind
                    found[key] = found.get(key, 0.0) + float(value)
    return found


def decode_open(query: Mapping[str, str]) -> bool:
    """Whether routers may send requests, in a query of ADMIT. Raises: Refusal for anything but true and false."""
    if (value := query.get("open")) not in ("true", "false"):
        raise Refusal(f"open: {value!r} is not one of true, false")
    return value == "true"


class SamplingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`sampling_params` of the generate route; fields of type Any must have a NEUTRAL value."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: Any = None
    routed_experts_prompt_start: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    structured_outputs: Any = None
    allowed_token_ids: Any = None
    extra_args: Any = None


class GenerateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Body of GENERATE."""

    token_ids: list[int]
    sampling_params: SamplingBody = SamplingBody()
    prompt_targets: list[list[int]] | None = None
    """Tokens to score at each prompt position after the first, -1 for none; only the embedded engine supports it."""
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    stream: bool = False
    stream_options: Any = None
    output_mode: str | None = None
    return_token_ids: bool | None = None
    features: FeaturesBody | None = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class AbortBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ABORT; without ids, all requests."""

    request_ids: list[str] | None = None


class LoadAdapterBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of LOAD_ADAPTER; lora_path: a directory in PEFT's format, on the engine's host."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False  # replace the adapter with this name
    is_3d_lora_weight: bool = False  # for vLLM; the embedded engine finds it out from the tensors


class UnloadAdapterBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of UNLOAD_ADAPTER."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM's field, without effect


_VLLM_SAMPLING = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "structured_outputs",
    "allowed_token_ids",
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (REPLAYED | NOT_REPLAYED)[name] for name in _VLLM_SAMPLING},
    "output_kind": (None, 0, 2),
    "extra_args": (None, {}),
    "include_stop_str_in_output": (False,),
    "stream": (False,),
    "stream_options": (None,),
    "output_mode": (None, "tokens"),
    "content_parts": (None,),
    "kv_transfer_params": (None, {}),
    "ec_transfer_params": (None, {}),
    "priority": (0,),
}
"""Values that have no effect, of vLLM's settings that the embedded engine does not have; it refuses other values."""


def require_neutral(body: msgspec.Struct) -> None:
    """Raises: Refusal for a setting that the embedded engine would otherwise ignore."""
    for name in body.__struct_fields__:
        allowed = NEUTRAL.get(name)
        if allowed is not None and getattr(body, name) not in allowed:
            raise Refusal(f"{name}: {getattr(body, name)!r} is not supported by the embedded engine; leave it out")


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode a body of this type.

    Raises: Refusal that names the field and what is wrong with it.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(_with_field_first(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise Refusal("the body is nested too deeply; a valid body has a few levels") from error


def _with_field_first(message: str) -> str:
    """msgspec's message with the field first: "top_k: expected `int | null`, got `str`"."""
    what, _, place = message.partition(" - at `")
    where = place.rstrip("`").removeprefix("$").removeprefix(".") or "the body"
    return f"{where}: {what[:1].lower()}{what[1:]}"


def sampling_params(body: SamplingBody) -> SamplingParams:
    """The record for a `sampling_params` body; top_k 0 and -1 mean all tokens, as in vLLM."""
    require_neutral(body)
    if body.logprobs is not None and not 0 <= body.logprobs <= 1:
        raise Refusal(f"logprobs: {body.logprobs} is not supported; 0 and 1 give the sampled token's logprob")
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k in (0, -1) else body.top_k,
        min_p=body.min_p,
        max_tokens=body.max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        min_tokens=body.min_tokens or 0,
        logit_bias=token_biases(body.logit_bias),
        bad_words=tuple(dict.fromkeys(body.bad_words or ())),
    )


def token_biases(body: Mapping[str, float] | None) -> dict[int, float]:
    """`logit_bias` of a body by token id. Raises: Refusal for a key that is no token id."""
    for key in body or ():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise Refusal(f"logit_bias: {key!r} is not a token id")
    return {int(key): bias for key, bias in (body or {}).items()}


def token_array(token_ids: Sequence[int], where: str) -> Int32[np.ndarray, " tokens"]:
    """Token ids as int32.

    Raises: Refusal for an id that does not fit into 32 bits, as for any other unknown id.
    """
    try:
        return np.array(token_ids, np.int32)
    except OverflowError:
        bad = next(i for i in token_ids if not -(2**31) <= i < 2**31)
        raise Refusal(f"{where}: token id {bad} is out of vocabulary") from None


def _target_array(rows: list[list[int]] | None) -> Int32[np.ndarray, "positions targets"] | None:
    """Rows of token ids. Raises: Refusal if their lengths differ."""
    if rows is None:
        return None
    if len({len(row) for row in rows}) > 1:
        raise Refusal("prompt_targets: its rows have several lengths; put -1 where there is no target")
    flat = token_array([each for row in rows for each in row], "prompt_targets")
    return flat.reshape(len(rows), -1) if rows else flat.reshape(0, 0)


def decode_generate(data: bytes) -> tuple[GenerateRequest, str | None]:
    """The request in a body of GENERATE, and the name of its model.

    Raises: Refusal if the body is not valid.
    """
    body = decode_json(data, GenerateBody)
    require_neutral(body)
    params = body.sampling_params
    try:
        images, image_token_id = decode_features(body.features, body.token_ids)
    except DataError as error:
        raise Refusal(str(error)) from error
    request = GenerateRequest(
        request_id=body.request_id or f"generate-{uuid4().hex}",
        prompt_ids=token_array(body.token_ids, "token_ids"),
        n=params.n,
        sampling=sampling_params(params),
        cache_salt=body.cache_salt,
        prompt_logprobs=params.prompt_logprobs is not None,
        top_prompt_logprobs=params.prompt_logprobs or 0,
        prompt_targets=_target_array(body.prompt_targets),
        images=images,
        image_token_id=image_token_id,
        routed_experts_start=params.routed_experts_prompt_start or 0,
    )
    if not 0 <= request.routed_experts_start <= len(request.prompt_ids):
        raise Refusal(
            f"routed_experts_prompt_start: {request.routed_experts_start} is not in the prompt of "
            f"{len(request.prompt_ids)} tokens"
        )
    return request, body.model


def encode_generate(request: GenerateRequest, model: str | None = None) -> bytes:
    """The body of GENERATE.

    Stop texts are found in text with special tokens. min_tokens is at most max_tokens, as vLLM demands; that is the
    same for a reply that ends there.
    """
    params = request.sampling
    least = params.min_tokens if params.max_tokens is None else min(params.min_tokens, params.max_tokens)
    return msgspec.json.encode(
        GenerateBody(
            token_ids=request.prompt_ids.tolist(),
            sampling_params=SamplingBody(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                min_p=params.min_p,
                max_tokens=params.max_tokens,
                n=request.n,
                seed=params.seed,
                stop=list(params.stop) or None,
                stop_token_ids=list(params.stop_token_ids) or None,
                ignore_eos=params.ignore_eos,
                min_tokens=least or None,
                logit_bias={str(token): bias for token, bias in params.logit_bias.items()} or None,
                bad_words=list(params.bad_words) or None,
                skip_special_tokens=not params.stop,
                logprobs=0,
                prompt_logprobs=request.top_prompt_logprobs if request.prompt_logprobs else None,
                routed_experts_prompt_start=request.routed_experts_start or None,
            ),
            prompt_targets=None if request.prompt_targets is None else request.prompt_targets.tolist(),
            model=request.adapter or model,
            request_id=request.request_id,
            cache_salt=_sent_salt(request.cache_salt),
            features=encode_features(request),
        )
    )


def _sent_salt(salt: str | None) -> str | None:
    """The salt, or its hash where vLLM refuses it: for its length, or for a character that a store may not take."""
    if not salt or (len(salt) <= _LONGEST_SALT and not set(salt) & set("@/\\\0")):
        return salt
    return hashlib.sha256(salt.encode()).hexdigest()


class _Models(msgspec.Struct, frozen=True):
    data: list[dict[str, Any]] = []


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str


class _Error(msgspec.Struct, frozen=True):
    error: _ErrorBody


def has_models(data: bytes) -> bool:
    """Whether an answer of MODELS names a model."""
    try:
        return bool(msgspec.json.decode(data, type=_Models).data)
    except msgspec.DecodeError:
        return False


def adapter_names(data: bytes) -> list[str]:
    """The adapters in an answer of MODELS: models that have another as their parent."""
    models = msgspec.json.decode(data, type=_Models).data
    return [model["id"] for model in models if model.get("parent")]


def error_message(data: bytes) -> str:
    """The message in an error body; any other body as text, shortened."""
    try:
        return msgspec.json.decode(data, type=_Error).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return data[:500].decode(errors="replace") or "(empty body)"
