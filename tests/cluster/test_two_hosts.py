"""Shapes of inference over two hosts, on real vLLM: a run trains with each, and its engines are asked afterwards.

The first host has orchestrator and trainer. Engines serve on when the run has ended, so that what they hold and where
requests go can be looked at. How a host that does not answer is treated is in tests/e2e and tests/contract.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import numpy as np
import pytest
import torch
from network import Host, network
from torch import Tensor

from stretto.base.paths import RunDir
from stretto.base.secret import load_secret
from stretto.chat.tokenizer import END_OF_TEXT, build_letters_tokenizer, load_tokenizer
from stretto.config.sections.engines import MooncakeOffload
from stretto.config.sections.model import ScratchSection
from stretto.ledger.audit import audit
from stretto.models.attention import PackedLayout
from stretto.models.hub import export_tensors, load_model, random_model, save_hf
from stretto.monitors.file import read_metrics
from stretto.records.generate import Completion, GenerateRequest, SamplingParams
from stretto.transports.engine import api
from stretto.transports.engine.client import EngineClient
from stretto_broadcast.collective import CollectivePublisher

PROGRAMS = ("ip", "nsenter", "unshare", "mount", "hostname")
DEADLINE_S = 840.0
STEPS = 3
BYTES_PER_TOKEN = 2 * 2 * 32 * 4
"""In the cache: layers, keys and values, dimensions of the one head, float32."""
KEY = "a-key-that-was-made-up"
PROMPT = np.random.default_rng(0).integers(10, 110, 300).astype(np.int32)

pytestmark = pytest.mark.cluster(*PROGRAMS, modules=("vllm", "vllm_router", "nixl", "mooncake"), root=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    (tmp_path / "network").mkdir()
    with network(3, tmp_path / "network", "sh") as found:
        yield found


def network_of(**shape: Any) -> torch.nn.Module:
    """A random network; heads of 32 dimensions, which vLLM supports on a CPU."""
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
    section = ScratchSection(hidden_size=32, intermediate_size=64, **heads, **shape)
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = load_tokenizer(build_letters_tokenizer(Path(directory)))
    ids = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.token_id(END_OF_TEXT)}
    return random_model(section, tokenizer.vocab_size, **ids)


def save_model(directory: Path, model: torch.nn.Module) -> Path:
    build_letters_tokenizer(directory / "tokenizer")
    save_hf(model, directory / "model", directory / "tokenizer")
    return directory / "model"


@dataclass
class Served:
    """The engines of a run that has ended: two hosts serve the weights of its last step."""

    run: RunDir
    router: str
    engines: list[str]
    model: torch.nn.Module
    ask: Callable[[Callable[[], Awaitable[None]]], None]
    """Runs a coroutine on the first host."""

    def client(self, *urls: str, admin: Sequence[str] | None = None) -> EngineClient:
        key = load_secret(self.run).text_key("inference.api_key")
        return EngineClient(urls, admin, api_key=key, timeout_s=300, max_retries=30)

    async def total(self, url: str, name: str) -> float:
        async with self.client(url) as client:
            return (await client.metrics()).get(name, 0.0)

    async def until_total(self, url: str, name: str, least: float) -> None:
        """Wait for a counter, which engines update after they have answered."""
        async with asyncio.timeout(60):
            while (found := await self.total(url, name)) < least:
                await asyncio.sleep(0.2)
                print(f"{url}: {name} is {found:g}, waiting for {least:g}")

    async def generate(self, url: str, name: str, *, salt: str, session: str | None = None) -> Completion:
        async with self.client(url) as client:
            [completion] = await client.generate(ask(name, salt, session))
        return completion


def ask(name: str, salt: str, session: str | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, cache_salt=salt, session_id=session)


def all_logprobs(model: torch.nn.Module, token_ids: np.ndarray) -> Tensor:
    """[tokens - 1, vocab]: of the token after each but the last, by one plain forward pass."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    with torch.no_grad():
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
        return torch.log_softmax(hidden @ model.output_weight.T, -1)[:-1]


def logprobs_of(model: torch.nn.Module, token_ids: np.ndarray) -> np.ndarray:
    """[tokens - 1]: each token's but the first's."""
    ids = torch.as_tensor(token_ids[1:], dtype=torch.int64)
    return all_logprobs(model, token_ids).gather(1, ids[:, None]).squeeze(1).numpy()


def assert_right(model: torch.nn.Module, completion: Completion) -> None:
    """Its logprobs are those of this model, and its tokens the likeliest ones."""
    whole, replies = np.concatenate([PROMPT, completion.token_ids]), slice(len(PROMPT) - 1, None)
    np.testing.assert_allclose(completion.logprobs, logprobs_of(model, whole)[replies], atol=5e-5, rtol=0)
    best = all_logprobs(model, whole)[replies].amax(1).numpy()
    np.testing.assert_allclose(completion.logprobs, best, atol=5e-5, rtol=0)


def train(hosts: list[Host], model: Path, directory: Path, inference: str, *, by_name: bool = False) -> Served:
    """Three steps of `rl`, started by the same command on each host; the engines go on serving.

    by_name: the hosts are given as names, as Slurm does, not as addresses.
    """
    (directory / "rl.toml").write_text(
        f'max_steps = {STEPS}\nseq_len = 512\noutput_dir = "{directory}"\n[run]\nname = "run"\n'
        f'[model]\nname = "{model}"\n[deployment]\ntype = "multi_node"\nnum_train_nodes = 1\ngpus_per_node = 0\n'
        f"hosts = {json.dumps([host.name if by_name else host.address for host in hosts])}\n[weight_broadcast]\ntype = "
        '"collective"\n[orchestrator]\nbatch_size = 16\ngroup_size = 4\n[[orchestrator.env]]\n'
        'id = "sort-letters"\nargs = { num_letters = 4 }\n[orchestrator.train.sampling]\nmax_completion_tokens = 6\n'
        "[trainer.optim]\nlr = 0.01\n[trainer.loss]\nentropy_coef = 0.01\n"
        f'[inference]\nengine = "vllm"\ndevice = "cpu"\n{inference}'
    )
    # The hosts share a kernel: left alone, NIXL's UCX would see that and take shared memory.
    words, env = [sys.executable, "-m", "stretto", "rl", "@", directory / "rl.toml"], {"UCX_TLS": "tcp"}
    nodes = [host.start(words, env) for host in hosts]
    output, _ = nodes[0].communicate(timeout=DEADLINE_S)
    run = RunDir(directory / "run")
    assert nodes[0].returncode == 0, output + logs(directory)
    assert [node.poll() for node in nodes[1:]] == [None, None], logs(directory)
    rows = [*read_metrics(run.metrics("orchestrator"))]
    assert max(row["step"] for row in rows) == STEPS
    errors = [row["canary/error"] for row in rows if "canary/error" in row]
    assert len(errors) >= STEPS and max(errors) < 1e-4
    assert audit(run) == []
    plan = json.loads(run.config("run").read_text())["orchestrator"]["client"]
    urls = [url.removesuffix("/v1") for url in (plan["base_url"], *plan["admin_base_url"])]
    for host in hosts:  # this process does not know their names
        urls = [url.replace(f"//{host.name}:", f"//{host.address}:") for url in urls]
    assert len(urls) == 3 and len(set(urls)) == 3, urls
    served, first = (load_model(path, dtype=torch.float32) for path in (run.weights_step(STEPS), model))
    change = np.abs(logprobs_of(served, PROMPT) - logprobs_of(first, PROMPT)).max()
    assert change > 1e-2, f"{change:g}: an engine that has kept its first weights would look right"
    return Served(run, urls[0], urls[1:], served, lambda check: hosts[0].inside(lambda: asyncio.run(check())))


def logs(directory: Path) -> str:
    files = sorted(directory.glob("run*/logs/*"))
    return "".join(f"\n== {file}\n{file.read_text()[-6000:]}" for file in files if file.is_file())


def test_replicas_behind_the_router_all_have_the_weights_and_sessions_stay(hosts: list[Host], tmp_path: Path) -> None:
    model = save_model(tmp_path, network_of(num_layers=1))
    served = train(hosts, model, tmp_path, '[inference.deployment]\ntype = "multi_node"\nnum_nodes = 2\n')

    async def check() -> None:
        for url in served.engines:
            completion = await served.generate(url, "direct", salt="direct")
            assert [span.version for span in completion.versions] == [STEPS]
            assert_right(served.model, completion)
        before = [await served.total(url, "vllm:prompt_tokens_total") for url in served.engines]
        for session in range(16):
            found = [
                await served.generate(
                    served.router, f"{session}-{turn}", salt=f"s{session}", session=f"session-{session}"
                )
                for turn in range(3)
            ]
            # Each session has a salt of its own: only the engine that has read its prompt has that in its cache.
            assert [completion.cached_tokens >= 256 for completion in found] == [False, True, True]
        for url, at_first in zip(served.engines, before):
            await served.until_total(url, "vllm:prompt_tokens_total", at_first + 3 * len(PROMPT))

    served.ask(check)


def test_prompts_are_read_on_one_host_and_replies_written_on_the_other(hosts: list[Host], tmp_path: Path) -> None:
    model = save_model(tmp_path, network_of(num_layers=2))
    served = train(
        hosts, model, tmp_path, '[inference.deployment]\ntype = "disaggregated"\ngpus_per_node = 1\n', by_name=True
    )
    prefill, decode = served.engines

    async def check() -> None:
        assert await served.total(prefill, "vllm:nixl_num_kv_expired_reqs_total") == 0, "all caches were fetched"
        hits = await served.total(decode, "vllm:external_prefix_cache_hits_total")
        moved = await served.total(decode, "vllm:nixl_bytes_transferred_sum")
        written = await served.total(prefill, "vllm:generation_tokens_total")
        sent = hosts[1].num_bytes_sent()
        by_two = await served.generate(served.router, "by-two", salt="two")
        assert hosts[1].num_bytes_sent() - sent >= len(PROMPT) * BYTES_PER_TOKEN
        by_one = await served.generate(decode, "by-one", salt="one")
        assert_right(served.model, by_two)
        assert by_two.token_ids.tolist() == by_one.token_ids.tolist()
        np.testing.assert_allclose(by_two.logprobs, by_one.logprobs, atol=1e-6, rtol=0)
        await served.until_total(decode, "vllm:external_prefix_cache_hits_total", hits + 256)
        await served.until_total(decode, "vllm:nixl_bytes_transferred_sum", moved + 1)
        assert await served.total(prefill, "vllm:generation_tokens_total") == written + 1
        async with (
            aiohttp.ClientSession() as stranger,
            stranger.post(
                served.router + api.GENERATE, json={"token_ids": [20, 21], "sampling_params": {"max_tokens": 1}}
            ) as answer,
        ):
            assert answer.status == 401

    served.ask(check)


def test_what_one_host_has_read_the_other_takes_from_the_store(hosts: list[Host], tmp_path: Path) -> None:
    model = save_model(tmp_path, network_of(num_layers=2))
    served = train(
        hosts,
        model,
        tmp_path,
        '[inference.deployment]\ntype = "multi_node"\nnum_nodes = 2\n'
        '[inference.kv_cache_offload]\ntype = "mooncake"\nprotocol = "tcp"\n'
        f"[inference.kv_cache_offload.cpu]\nnum_bytes = {64 << 20}\n",
        by_name=True,
    )
    first, second = served.engines

    async def check() -> None:
        stored, sent = num_stored(hosts[1]), hosts[1].num_bytes_sent()
        assert_right(served.model, await served.generate(first, "first", salt="a"))
        assert await served.total(second, "vllm:external_prefix_cache_hits_total") == 0
        # The first stores what it has read after it has answered.
        async with asyncio.timeout(60):
            while num_stored(hosts[1]) < stored + len(PROMPT) // 32:
                await asyncio.sleep(0.2)
        assert_right(served.model, await served.generate(second, "second", salt="a"))
        await served.until_total(second, "vllm:external_prefix_cache_hits_total", 256)
        # Whichever host's part of the store has a block, it has gone from the first host to the second once.
        assert hosts[1].num_bytes_sent() - sent >= 256 * BYTES_PER_TOKEN
        assert (await served.generate(second, "third", salt="b")).cached_tokens == 0

    served.ask(check)


def num_stored(master: Host) -> int:
    """Blocks in the store, as its master's own metrics say; asked on its host, so that nothing is sent for that."""
    url = f"http://{master.address}:{MooncakeOffload.model_fields['metrics_port'].default}/metrics"
    text = master.inside(lambda: urlopen(url, timeout=60).read().decode())
    [count] = re.findall(r"^master_key_count (\d+)", text, re.MULTILINE)
    return int(count)


def mixture(seed: int) -> torch.nn.Module:
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return network_of(num_layers=2, seed=seed, family="qwen3_moe", **shape)


def test_experts_of_one_engine_are_on_both_hosts(hosts: list[Host], tmp_path: Path) -> None:
    served = train(
        hosts,
        save_model(tmp_path, mixture(0)),
        tmp_path,
        "enable_expert_parallel = true\nparallel.dp = 2\n"
        '[inference.deployment]\ntype = "multi_node"\nnum_nodes = 2\ngpus_per_node = 1\n',
    )

    async def check() -> None:
        for salt, url in (("one", served.engines[0]), ("two", served.engines[1]), ("any", served.router)):
            completion = await served.generate(url, salt, salt=salt)
            assert [span.version for span in completion.versions] == [STEPS]
            assert_right(served.model, completion)

    served.ask(check)


def test_a_headless_host_gets_the_weights_of_the_engine_whose_server_is_elsewhere(
    hosts: list[Host], tmp_path: Path
) -> None:
    """The commands of docs/deployment.md; the third host sends weights, to both at once."""
    head, headless, trainer = hosts
    model = save_model(tmp_path, mixture(0))
    words = [sys.executable, "-m", "stretto", "inference", "--model", str(model)]
    words += ["--data-parallel-size", "2", "--data-parallel-size-local", "1", "--enable-expert-parallel"]
    words += ["--data-parallel-address", head.address, "--data-parallel-rpc-port", "29550"]
    first = head.start(words, {"VLLM_API_KEY": KEY}, cwd=tmp_path)
    second = headless.start([*words, "--data-parallel-start-rank", "1", "--headless"], cwd=tmp_path)

    async def update_and_check() -> None:
        publisher = CollectivePublisher(trainer.address, 29501, bucket_bytes=50_000, timeout_s=60)
        url = f"http://{head.address}:8000"
        async with EngineClient([url], api_key=KEY, timeout_s=300, max_retries=30) as client:
            await client.wait_ready(DEADLINE_S)
            for version, seed in enumerate((1, 0), start=1):
                await client.update_weights(publisher.publish(version, export_tensors(mixture(seed))))
                publisher.release(version - 1)
                # Each rank has half of the experts, so these are right only if both have loaded the version.
                [found] = (await client.score_canary(PROMPT, f"canary-{version}")).values()
                np.testing.assert_allclose(found.prompt[1:], logprobs_of(mixture(seed), PROMPT), atol=5e-5, rtol=0)
                for name in range(4):
                    [completion] = await client.generate(ask(f"v{version}-{name}", salt=f"v{version}"))
                    assert [span.version for span in completion.versions] == [version]
                    assert_right(mixture(seed), completion)
            await client.close()
        publisher.close()

    try:
        trainer.inside(lambda: asyncio.run(update_and_check()))
    finally:
        running = [node.poll() for node in (first, second)]
        for node in (first, second):
            node.terminate()
        outputs = [node.communicate(timeout=60)[0] for node in (first, second)]
        print("\n\n".join(outputs))
    assert running == [None, None] and [first.returncode, second.returncode] == [0, 0], outputs
