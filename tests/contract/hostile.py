"""Requests that are valid, nearly valid, and hostile, from a seed; and sending them.

Calls that are valid but would affect other tests are not included: pausing, unloading, complete new weights.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from stretto.transports.engine import api

MESSAGES = [{"role": "user", "content": "sort: cab"}]
PLAIN: dict[str, dict[str, Any]] = {
    api.GENERATE: {"token_ids": [20, 21, 22], "sampling_params": {"max_tokens": 4, "seed": 1}},
    api.COMPLETIONS: {"prompt": "cab", "max_tokens": 4, "seed": 1},
    api.CHAT_COMPLETIONS: {"messages": MESSAGES, "max_tokens": 4, "seed": 1},
    api.TOKENIZE: {"prompt": "cab"},
    api.DETOKENIZE: {"tokens": [20, 21]},
    api.UPDATE_WEIGHTS: {"update_info": {"manifest": {"version": 1, "transport": "shm", "location": "x"}}},
    api.FINISH_UPDATE: {"weight_version": 3},
    api.LOAD_ADAPTER: {"lora_name": "a", "lora_path": "/nowhere"},
    api.UNLOAD_ADAPTER: {"lora_name": "a"},
    api.ABORT: {"request_ids": ["nobody"]},
}
ROUTES = [*[api.GENERATE] * 6, *[api.COMPLETIONS] * 5, *[api.CHAT_COMPLETIONS] * 5, *PLAIN]
SETTINGS: dict[str, list[Any]] = {
    "temperature": [0, 0.5, 1e-39, 1e-5, 5e-324, -0.0, 2, 1e300, -1],
    "top_k": [0, -1, 1, 5, 10**6, 2**31 - 1, 2**31, 2**63, -(2**63) - 1],
    "top_p": [0.5, 1, 1e-300, 0, 1.1],
    "min_p": [0, 0.1, 1, -0.1, 2],
    "n": [1, 2, 5, 0, -1, 2000, 10**9, 2**63],
    "seed": [0, -1, 7, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 2**70],
    "max_tokens": [1, 3, 0, -1, 600, 2**31, 2**63],
    "min_tokens": [0, 2, -1, 2**63, 10**6],
    "stop": ["a", ["a", "b"], "", [""], ["x"] * 1000, "y" * 100_000, [1], {}, "\u0000", "\U0001f600"],
    "stop_token_ids": [[5], [], [2**63], [-1], [10**6], [1.5], ["a"], [3] * 5000, "a"],
    "logprobs": [0, 1, 5, -1, 10**6, 2**63, True],
    "prompt_logprobs": [0, 1, -1, 10**6, 2**63],
    "ignore_eos": [True, False, 1, "x"],
    "presence_penalty": [0, 0.5, -3, "x"],
    "frequency_penalty": [0, 1.5, 1e300],
    "repetition_penalty": [1, 1.2, 0, -1, 1e300],
    "logit_bias": [{}, {"5": 3}, {"x": 1}, {"-1": 1}, {"99999999999999999999": 1}, {"5": None}, []],
    "bad_words": [[], ["ab"], [""], ["a" * 5000], [1], "x"],
    "allowed_token_ids": [None, [5, 6], [], [-1], [2**63], "a"],
    "structured_outputs": [None, {}, {"regex": "a+"}, {"regex": "(("}, {"json": "{"}, {"json": {"type": 3}}, {"x": 1},
                           5, {"choice": ["a", "b"]}, {"choice": []}, {"grammar": "root ::= "}, {"json_object": True}],
    "extra_args": [None, {}, {"a": 2**70}, [], 1],
    "skip_special_tokens": [True, False, None],
    "detokenize": [True, False],
    "output_kind": [0, 1, 2, 7],
    "routed_experts_prompt_start": [0, 2, -1, 2**63],
    "include_stop_str_in_output": [True, False],
    "repetition_detection": [{"max_pattern_size": -1}],
    "logprob_token_ids": [[1], [2**63]],
    "trace_decode_token_ids": [[1], [10**9]],
    "_all_stop_token_ids": [[1]],
}  # fmt: skip
BODY: dict[str, list[Any]] = {
    "model": [None, "nobody", "", 5, "../x", "a" * 10_000],
    "request_id": ["same", "", "a" * 10_000, "\u0000\n", 5, None],
    "cache_salt": ["s", "", "a" * 5000, 5],
    "priority": [0, 1, 2**63, "x"],
    "stream": [True, False, 1, None],
    "stream_options": [None, {"include_usage": True}, {"x": 1}, 5],
    "features": [None, {}, {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 9}]}}],
    "content_parts": [None, [], [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]],
    "kv_transfer_params": [None, {}, {"do_remote_prefill": True, "remote_block_ids": [2**40]}],
    "output_mode": ["tokens", "text", "x"],
    "echo": [True, False, 1],
    "suffix": ["x", ""],
    "best_of": [1, 3, 10**9],
    "tools": [[], [{}], [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}], 5, [5]],
    "tool_choice": ["auto", "none", "required", {"x": 1}, 5],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "x"}, 5],
    "top_logprobs": [0, 3, 1000],
    "chat_template_kwargs": [{}, {"enable_thinking": True}, {"x": 1}, 5],
    "chat_template": ["{{ x.y.z }}", "{% for i in range(10) %}a{% endfor %}", "{{"],
    "add_special_tokens": [True, False],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True, False],
    "truncate_prompt_tokens": [1, 0, -1, 2**63],
    "prompt_embeds": ["AAAA"],
    "use_beam_search": [True],
    "max_completion_tokens": [1, 0, 2**63],
    "user": ["u", 5],
    "documents": [[{"a": 1}], 5],
    "mm_processor_kwargs": [{"a": 1}],
    "vllm_xargs": [{"a": 2**70}],
    "data_parallel_rank": [0, 5],
}  # fmt: skip
PROMPTS: list[Any] = [
    "", "ab", "a" * 20_000, "\u0000", "\U0001f600" * 50, "<|im_start|>user", [], [5], [5, -1], [10**6], [2**63], [[]],
    [[5], []], [[5], [6, 7]], ["a", "b"], ["a", 5], [["a"]], [None], [1.5], [True], 5, None, {}, ["a"] * 300, [5] * 600,
    [[5]] * 40,
]  # fmt: skip
CONVERSATIONS: list[Any] = [
    [], [{}], [5], 5, "x", [{"role": "user"}], [{"role": 5, "content": "a"}], [{"role": "user", "content": 5}],
    [{"role": "nobody", "content": "a"}], [{"role": "user", "content": ["a", {"type": "text", "text": 5}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
    [{"role": "assistant", "tool_calls": 5}, *MESSAGES], [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": 5, "type": "function",
      "function": {"name": "f", "arguments": "{"}}]}, {"role": "tool", "content": "x", "tool_call_id": "y"}, *MESSAGES],
    [{"role": "tool", "content": "x"}], [{"role": "user", "content": "a" * 20_000}], MESSAGES * 40,
    [{"role": "user", "content": "a", "name": 5, "x": {"y": [1]}}], [{"role": "system", "content": ""}, *MESSAGES],
]  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**40, 1.5, -0.0, 5e-324, 1e308, "", "a", "\u0000",
    "a" * 3000, [], [[]], [None], {}, {"a": {"b": [1]}}, [1] * 300,
]  # fmt: skip
HEADERS: list[dict[str, str]] = [
    {}, {}, {}, {"X-Request-Id": "a" * 200}, {"Content-Encoding": "gzip"}, {"Content-Type": "text/plain"},
    {"X-Session-ID": "\u00ff"}, {"X-data-parallel-rank": "99"}, {"Accept-Encoding": "x"}, {"Content-Encoding": "br"},
]  # fmt: skip
STRANGE: list[bytes] = [
    b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"a":NaN}', b'{"token_ids":[1e999]}', b"[" * 3000,
    b'{"a":' * 3000, b'{"prompt":"\\ud800"}', b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":"a","prompt":5}', b"{}" * 50,
    b'{"' + b"a" * 5000 + b'":1}', b'{"token_ids":[' + b"1," * 5000 + b"1]}",
]  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """One request."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def shots(seed: int, count: int) -> Iterator[Shot]:
    """The same requests for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(ROUTES)
        method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
        if rng.random() < 0.06:
            yield Shot(method, path, rng.choice(STRANGE), rng.choice(HEADERS))
            continue
        body = json.dumps(_body(rng, path)).encode()
        if rng.random() < 0.06 and body:
            at = rng.randrange(len(body))
            body = body[:at] + bytes([rng.randrange(256)]) * rng.randrange(3) + body[at + 1 :]
        yield Shot(method, path, body, rng.choice(HEADERS) if rng.random() < 0.3 else {})


def _body(rng: random.Random, path: str) -> Any:
    body: dict[str, Any] = json.loads(json.dumps(PLAIN[path]))
    is_text = path in (api.COMPLETIONS, api.CHAT_COMPLETIONS, api.TOKENIZE)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        params = (
            body["sampling_params"] if path == api.GENERATE and isinstance(body.get("sampling_params"), dict) else body
        )
        kind = rng.random()
        if kind < 0.5 and (is_text or path == api.GENERATE):
            name = rng.choice([*SETTINGS])
            params[name] = rng.choice(SETTINGS[name])
        elif kind < 0.7 and (is_text or path == api.GENERATE):
            name = rng.choice([*BODY])
            body[name] = rng.choice(BODY[name])
        elif kind < 0.85:
            name = {api.GENERATE: "token_ids", api.DETOKENIZE: "tokens"}.get(path, "prompt" if is_text else "lora_path")
            if path == api.CHAT_COMPLETIONS or (path == api.TOKENIZE and rng.random() < 0.5):
                body["messages"] = rng.choice(CONVERSATIONS)
            else:
                body[name] = rng.choice(PROMPTS)
        else:
            target = rng.choice([body, params])
            target[rng.choice([*target, "x"])] = rng.choice(VALUES)
    return body


@dataclass
class Outcome:
    """Requests by status, and those that failed."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[tuple[Shot, int, str]] = field(default_factory=list)


async def fire(url: str, shots: Iterator[Shot], *, key: str | None = None, at_a_time: int = 12) -> Outcome:
    """Send all requests; a failure is an answer of 5xx, no answer, or one that takes a minute."""
    outcome = Outcome()
    base = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    async def worker(session: aiohttp.ClientSession) -> None:
        for shot in shots:
            status, text = 0, ""
            for _ in range(2):  # a connection may be closed between two requests: then it is sent again
                try:
                    async with asyncio.timeout(60):
                        headers = {**base, **shot.headers}
                        request = session.request(shot.method, url + shot.path, data=shot.body, headers=headers)
                        async with request as response:
                            status, text = response.status, (await response.text(errors="replace"))[-600:]
                    break
                except (aiohttp.ClientError, TimeoutError) as error:
                    text = repr(error)
            outcome.statuses[status] += 1
            if status == 0 or status >= 500 or '"code":500' in text.replace(" ", ""):
                outcome.failures.append((shot, status, text))

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(worker(session) for _ in range(at_a_time)))
    return outcome


async def greedy(url: str, key: str | None = None) -> list[int]:
    """The engine's reply to a plain request, token by token."""
    body = {"token_ids": [20, 21, 22], "sampling_params": {"max_tokens": 24, "temperature": 0, "ignore_eos": True}}
    body["sampling_params"]["logprobs"] = 0
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url + api.GENERATE, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["token_ids"]
