"""HTTP API of the engine, both directions: generate (tokens in, tokens out) and admin routes with their bodies.

The JSON is that of vLLM's `/inference/v1/generate` (0.32), so the same client works with the embedded engine and
vLLM. The server calls `decode_generate` and `encode_completions`; the client calls `encode_generate` and
`decode_completions`. A body that does not fit the schema raises `Refusal`; every route answers with its `body()`.
"""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import numpy as np

from stretto.base.errors import DataError, EngineError, StrettoError, WireError
from stretto.records.generate import Completion, GenerateRequest, SamplingParams, VersionSpan
from stretto.records.support import Support
from stretto.transports.engine.images import FeaturesBody, decode_features, encode_features

if TYPE_CHECKING:
    from jaxtyping import Int32, UInt

GENERATE = "/inference/v1/generate"
MODELS = "/v1/models"
COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
HEALTH = "/health"
LIVENESS = "/liveness"
IDLE = "idle=true"
"""Query of LIVENESS: an engine that still loads weights is not alive; otherwise it is."""
READINESS = "/readiness"
"""A router's route: whether it has accepted an engine."""
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
PAUSE_MODES = ("abort", "wait", "keep")


class Refusal(StrettoError):
    """The request is answered with an error: an HTTP status, and a message for its sender."""

    def __init__(self, message: str, status: int = 400, *, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or HTTPStatus(status).phrase.replace(" ", "").removesuffix("Error") + "Error"

    def body(self) -> bytes:
        return msgspec.json.encode({"error": {"message": str(self), "type": self.kind, "code": self.status}})


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
    min_tokens: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    bad_words: Any = None
    structured_outputs: Any = None
    allowed_token_ids: Any = None
    extra_args: Any = None


class GenerateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Body of GENERATE."""

    token_ids: list[int]
    sampling_params: SamplingBody = SamplingBody()
    prompt_targets: list[list[int]] | None = None
    """Further tokens to score at each prompt position but the first, -1 for none; only the embedded engine has it."""
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


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "output_kind": (None, 0, 2),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "allowed_token_ids": (None,),
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
"""Values of vLLM's other settings that change nothing; the embedded engine refuses all others."""


def require_neutral(body: msgspec.Struct) -> None:
    """Raises: Refusal for a setting that the embedded engine would otherwise ignore."""
    for name in body.__struct_fields__:
        allowed = NEUTRAL.get(name)
        if allowed is not None and getattr(body, name) not in allowed:
            raise Refusal(
                f"{name}: {getattr(body, name)!r} is not supported by the embedded engine; leave it out"
            )


def decode_json(data: bytes, kind: type[Any]) -> Any:
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
    )


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
    """Rows of token ids. Raises: Refusal if they are not of one length."""
    if rows is None:
        return None
    if len({len(row) for row in rows}) > 1:
        raise Refusal("prompt_targets: its rows have several lengths; put -1 where there is no target")
    flat = token_array([each for row in rows for each in row], "prompt_targets")
    return flat.reshape(len(rows), -1) if rows else flat.reshape(0, 0)


def decode_generate(data: bytes) -> tuple[GenerateRequest, str | None]:
    """The request in a body of GENERATE, and the model that it names.

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


def encode_completions(
    request: GenerateRequest, completions: list[Completion], stop_reasons: list[int | str | None]
) -> bytes:
    """The answer of GENERATE."""
    first = completions[0]
    prompt_tokens = len(request.prompt_ids)
    completion_tokens = sum(len(c.token_ids) for c in completions)
    choices = []
    for index, (completion, stop_reason) in enumerate(zip(completions, stop_reasons)):
        ids = completion.token_ids.tolist()
        choices.append(
            {
                "index": index,
                "finish_reason": completion.finish_reason,
                "stop_reason": stop_reason,
                "token_ids": ids,
                "routed_experts": encode_array(completion.routed_experts),
                "sampling_mask": None if completion.support is None else completion.support.lists(),
                "weight_versions": [
                    {"version": str(s.version), "start": s.start, "end": s.end} for s in completion.versions
                ],
                "logprobs": {
                    "content": [
                        {"token_id": i, "logprob": x} for i, x in zip(ids, completion.logprobs.tolist())
                    ]
                },
            }
        )
    return msgspec.json.encode(
        {
            "request_id": request.request_id,
            "usage": usage(prompt_tokens, completion_tokens, first.cached_tokens),
            "prompt_logprobs": encode_prompt_logprobs(request, first),
            "prompt_target_logprobs": None
            if first.target_prompt_logprobs is None
            else first.target_prompt_logprobs.tolist(),
            "kv_transfer_params": None,
            "choices": choices,
        }
    )


def encode_array(array: UInt[np.ndarray, "tokens layers top_k"] | None) -> str | None:
    """An array in vLLM's form of routed experts: an .npy file in base64."""
    if array is None:
        return None
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return b64encode(file.getbuffer()).decode()


def decode_routed_experts(
    text: str | None, num_tokens: int
) -> UInt[np.ndarray, "tokens layers top_k"] | None:
    """The expert choices for the last `num_tokens` tokens of prompt and completion.

    vLLM omits the last token, from which nothing was predicted; it is then marked as unknown.

    Raises: WireError if the text is not such an array.
    """
    if text is None:
        return None
    try:
        array = np.load(io.BytesIO(b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise WireError(f"{GENERATE}: routed_experts is not an .npy file in base64: {error}") from error
    if array.ndim != 3 or array.dtype not in (np.uint8, np.uint16) or num_tokens - len(array) not in (0, 1):
        raise WireError(
            f"{GENERATE}: routed_experts is {array.dtype}{list(array.shape)}; uint8 or uint16 "
            f"[{num_tokens} or {num_tokens - 1}, layers, top_k] was expected"
        )
    if len(array) == num_tokens:
        return array
    unknown = np.full((1, *array.shape[1:]), np.iinfo(array.dtype).max, array.dtype)
    return np.concatenate((array, unknown))


def decode_sampling_mask(
    request: GenerateRequest, mask: list[list[int]] | None, num_tokens: int
) -> Support | None:
    """The tokens that each completion token was drawn from; None if the request cuts nothing.

    Raises: WireError if the mask has another number of tokens.
    """
    if mask is None or not request.sampling.is_truncated:
        return None
    if len(mask) != num_tokens:
        text = f"sampling_mask has {len(mask)} entries for {num_tokens} tokens"
        raise WireError(f"{GENERATE}: the answer to {request.request_id} does not fit: {text}")
    try:
        return Support.of(mask)
    except OverflowError as error:
        raise WireError(f"{GENERATE}: sampling_mask has a token id beyond 32 bits: {error}") from error


def encode_prompt_logprobs(request: GenerateRequest, completion: Completion) -> list[Any] | None:
    """Prompt logprobs in vLLM's form: null for the first token, then {token id: {logprob}} of it and the likeliest."""
    if completion.prompt_logprobs is None:
        return None
    pairs = zip(request.prompt_ids.tolist(), completion.prompt_logprobs.tolist())
    found: list[Any] = [{str(i): {"logprob": x}} for i, x in pairs]
    if completion.top_prompt_ids is not None and completion.top_prompt_logprobs is not None:
        rows = zip(found, completion.top_prompt_ids.tolist(), completion.top_prompt_logprobs.tolist())
        for entry, ids, logprobs in rows:
            entry |= {str(i): {"logprob": x} for i, x in zip(ids, logprobs)}
    return [None, *found[1:]]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def encode_generate(request: GenerateRequest, model: str | None = None) -> bytes:
    """The body of GENERATE."""
    params = request.sampling
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
                logprobs=0,
                prompt_logprobs=request.top_prompt_logprobs if request.prompt_logprobs else None,
                routed_experts_prompt_start=request.routed_experts_start or None,
            ),
            prompt_targets=None if request.prompt_targets is None else request.prompt_targets.tolist(),
            model=request.adapter or model,
            request_id=request.request_id,
            cache_salt=request.cache_salt,
            features=encode_features(request),
        )
    )


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Logprob(msgspec.Struct, frozen=True):
    logprob: float | None  # None if it was not finite, which JSON cannot express


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Logprob]


class _Choice(msgspec.Struct, frozen=True):
    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs
    weight_versions: list[_Span] = []
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _CachedTokens | None = None


class _Carried(msgspec.Struct, frozen=True):
    """What a router that has no fields for it carries unseen: launch/run/dynamo_router.py puts it there."""

    weight_versions: dict[str, list[_Span]] = {}
    usage: _Usage | None = None


class _Transfer(msgspec.Struct, frozen=True):
    stretto: _Carried = _Carried()


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage = _Usage()
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None
    prompt_target_logprobs: list[list[float | None]] | None = None
    kv_transfer_params: _Transfer | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[dict[str, Any]] = []


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str


class _Error(msgspec.Struct, frozen=True):
    error: _ErrorBody


_ANSWER = msgspec.json.Decoder(_Answer)


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


def decode_completions(request: GenerateRequest, data: bytes) -> list[Completion]:
    """The completions in an answer of GENERATE, in sample order.

    Raises: WireError if the answer does not fit the schema, EngineError if log-probabilities are not finite.
    """
    try:
        answer = _ANSWER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{GENERATE}: the answer to {request.request_id} does not fit: {error}") from error
    if len(answer.choices) != request.n:
        raise WireError(f"{GENERATE}: requested n = {request.n} samples, received {len(answer.choices)}")
    carried = (answer.kv_transfer_params or _Transfer()).stretto
    details = (carried.usage or answer.usage).prompt_tokens_details
    prompt_logprobs = None
    if request.prompt_logprobs and answer.prompt_logprobs is not None:
        ids = request.prompt_ids.tolist()
        pairs = zip(ids, answer.prompt_logprobs)
        prompt_logprobs = np.array([0.0 if e is None else e[str(i)].logprob for i, e in pairs], np.float32)
    top_ids, top_logprobs = _decode_top(request, answer)
    targets = _decode_targets(request, answer)
    return [
        Completion(
            token_ids=np.array(choice.token_ids, np.int32),
            logprobs=_finite_logprobs(request, choice),
            finish_reason=choice.finish_reason,
            versions=tuple(
                VersionSpan(_version(s.version), s.start, s.end)
                for s in choice.weight_versions or carried.weight_versions.get(str(choice.index), [])
            ),
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            prompt_logprobs=prompt_logprobs,
            top_prompt_ids=top_ids,
            top_prompt_logprobs=top_logprobs,
            target_prompt_logprobs=targets,
            routed_experts=decode_routed_experts(
                choice.routed_experts,
                len(request.prompt_ids) - request.routed_experts_start + len(choice.token_ids),
            ),
            support=decode_sampling_mask(request, choice.sampling_mask, len(choice.token_ids)),
        )
        for choice in sorted(answer.choices, key=lambda c: c.index)
    ]


def _decode_top(request: GenerateRequest, answer: _Answer) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The likeliest tokens of each prompt position, best first, and their logprobs: int32, float32 [prompt, top]."""
    top = request.top_prompt_logprobs
    if not top or answer.prompt_logprobs is None:
        return None, None
    ids = np.zeros((len(answer.prompt_logprobs), top), np.int32)
    logprobs = np.zeros(ids.shape, np.float32)
    for at, entry in enumerate(answer.prompt_logprobs):
        pairs = [(int(i), x.logprob) for i, x in (entry or {}).items() if x.logprob is not None]
        best = sorted(pairs, key=lambda pair: -pair[1])[:top]
        if len(best) < top and entry is not None:
            raise WireError(
                f"{GENERATE}: {len(best)} likeliest tokens at prompt position {at}, not {top} ({request.request_id})"
            )
        for column, (token, logprob) in enumerate(best):
            ids[at, column], logprobs[at, column] = token, logprob
    return ids, logprobs


def _decode_targets(request: GenerateRequest, answer: _Answer) -> np.ndarray | None:
    """Logprobs of the request's targets, float32 [prompt - 1, targets].

    Raises: Refusal if this engine has none.
    """
    if request.prompt_targets is None:
        return None
    if answer.prompt_target_logprobs is None:
        raise Refusal("prompt_targets: this engine has log-probabilities of the likeliest tokens only")
    return np.array(answer.prompt_target_logprobs, np.float32).reshape(request.prompt_targets.shape)


def _finite_logprobs(request: GenerateRequest, choice: _Choice) -> np.ndarray:
    logprobs = np.array([entry.logprob for entry in choice.logprobs.content], np.float32)
    if not np.isfinite(logprobs).all():
        version = choice.weight_versions[-1].version if choice.weight_versions else "0"
        raise EngineError(
            f"weights of version {version} give log-probabilities that are not finite ({request.request_id}): training "
            "has diverged, or the model is damaged"
        )
    return logprobs


def error_message(data: bytes) -> str:
    """The message in an error body; any other body as text, shortened."""
    try:
        return msgspec.json.decode(data, type=_Error).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return data[:500].decode(errors="replace") or "(empty body)"


def _version(text: str) -> int:
    """A version in an answer; vLLM's "default" means never updated, which is version 0."""
    return int(text) if text.isdigit() else 0
