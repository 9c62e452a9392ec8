"""Engine servers as child processes, for the contract tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from ports import free_port
from processes import forked

from stretto.chat.tokenizer import build_letters_tokenizer
from stretto.config.sections.model import ScratchSection
from stretto.models.attention import PackedLayout
from stretto.models.hub import random_model, save_hf
from stretto.transports.engine.client import EngineClient

VOCAB = 112
STOP_S = 60.0
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: `make vllm`")


def scratch(seed: int, *, is_tied: bool = True):
    """A small model that vLLM's CPU attention supports: heads of 32 dimensions."""
    section = ScratchSection(
        seed=seed, num_heads=2, num_kv_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=is_tied
    )
    return random_model(section, VOCAB, eos_token_id=2)


def save(model, path: Path) -> Path:
    build_letters_tokenizer(path)
    save_hf(model, path, path)
    return path


@contextlib.contextmanager
def serve(
    engine: str,
    model: Path,
    log: Path,
    *flags: str,
    env: Mapping[str, str] = MappingProxyType({}),
    start: type[subprocess.Popen] = forked.Popen,
) -> Iterator[tuple[str, subprocess.Popen]]:
    """`stretto inference --engine ...` in a process group of its own; its address."""
    port = free_port()
    words = ["--model", str(model), "--server.port", str(port), "--output-dir", str(log.parent)]
    words += ["--engine", engine, "--max-model-len", "512", *flags]
    with log.open("wb") as out:
        child = start(
            [sys.executable, "-m", "stretto", "inference", *words],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **env},
        )
    try:
        yield f"http://127.0.0.1:{port}", child
    finally:
        stop(child)


@contextlib.contextmanager
def serve_ready(engine: str, model, directory: Path, *flags: str) -> Iterator[str]:
    """`serve` this model, with its files in `directory`; the address, once the engine answers."""

    async def wait(url: str) -> None:
        async with EngineClient([url]) as client:
            await client.wait_ready(240)

    with serve(engine, save(model, directory / "model"), directory / "log", *flags) as (url, _):
        asyncio.run(wait(url))
        yield url


def stop(child: subprocess.Popen) -> None:
    """Stop it by SIGTERM, as a user does; kill it after STOP_S."""
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise


def logprobs_of(model, token_ids, temperature: float = 1.0):
    """float32 [tokens - 1]: token t + 1 given those before it, by one plain forward pass."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    with torch.no_grad():
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
        logits = hidden @ model.output_weight.T
    return torch.log_softmax(logits / temperature, -1)[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()


async def until_counted(client: EngineClient, name: str, value: float) -> None:
    """Wait until a metric of the one engine has this value."""
    async with asyncio.timeout(60):
        while (await client.metrics()).get(name) != value:
            await asyncio.sleep(0.01)


async def scores_of(client: EngineClient, token_ids: np.ndarray, name: str) -> np.ndarray:
    """The one engine's log-probabilities of these tokens; those of tokens that it samples are checked on the way."""
    [scores] = (await client.score_canary(token_ids, name)).values()
    assert len(scores.decoded) > 0
    np.testing.assert_allclose(scores.decoded, scores.read, atol=3e-5, rtol=0)
    return scores.prompt
