"""JSON bodies of the Tinker API, as its clients send them; unknown fields are refused, so that none is ignored."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""Number of a request, or of a model or sampler in its session; it becomes part of file names."""
Seconds = Annotated[int, msgspec.Meta(gt=0, le=100 * 365 * 86400)]
"""Seconds for which something is kept, at most a hundred years."""


Label = Annotated[str, msgspec.Meta(max_length=1000)]
"""A name that a client gives."""


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body; `type` repeats the name of the route."""

    type: str | None = None


class ClientConfigBody(Body, frozen=True):
    sdk_version: str = ""


class CreateSessionBody(Body, frozen=True):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: Label | None = None
    display_name: str | None = None


class SessionBody(Body, frozen=True):
    session_id: str


class LoraBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelBody(Body, frozen=True):
    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None


class ModelBody(Body, frozen=True):
    model_id: str


class AdamBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(Body, frozen=True):
    model_id: str
    seq_id: Number
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(Body, frozen=True):
    model_id: str
    seq_id: Number
    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None


class LoadBody(Body, frozen=True):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class ChunkBody(msgspec.Struct, frozen=True):
    """A part of a prompt; only tokens are supported."""

    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chunks: list[ChunkBody]


class SamplingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array; sparse ones have the two lists of indices."""

    data: list[int]
    dtype: str = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(Body, frozen=True):
    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class SamplingSessionBody(Body, frozen=True):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class JoinBody(Body, frozen=True):
    sampling_session_id: str


class FutureBody(Body, frozen=True):
    request_id: str
    allow_metadata_only: bool = False


class FuturesTargetBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sampling_session_id: str
    type: str = "sampling_session"
    cloned_sampler_id: int = 0


class FuturesBody(Body, frozen=True):
    target: FuturesTargetBody
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class PathBody(Body, frozen=True):
    tinker_path: str


class TtlBody(Body, frozen=True):
    ttl_seconds: Seconds | None = None


class FinishBody(Body, frozen=True):
    reason: dict[str, Any] = {}
    detail: str | None = None
