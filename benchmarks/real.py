"""A small model with real weights: decoding and training beside other engines and libraries, in float32 and bfloat16.

    python benchmarks/real.py MODEL [--quick] [--part decode|train] [--dtype float32|bfloat16]
                              [--llama-python PYTHON --gguf FILE]

MODEL is a directory with a checkpoint, such as SmolLM2-135M-Instruct. Every engine is a process of its own with one
thread on one processor; all stay loaded and take turns, a batch each, so that whatever else the machine does falls on
all. decode: prompts of 40 tokens, 32 new ones per prompt, sampled at temperature 1, at batches of 1, 16 and 64. train: policy
gradients over 64 rows of 72 tokens, then over rows whose lengths differ, beside a plain loop of transformers; with LoRA
beside peft. llama.cpp runs in the Python that has `llama-cpp-python`, on a GGUF file of the same model.

`tokens_per_cpu_s` is what to trust on a busy machine. memory_mb is the peak of the process, imports_mb what it had before
the model was loaded, cache_mb the cache that was asked for. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPT_TOKENS, NEW_TOKENS = 40, 32
BATCHES = (1, 16, 64)
CACHE_TOKENS = 8192
VOCAB = 49_000
"""Token ids of random prompts are below this."""

Round = Callable[[int, int], int]
"""(batch, seed) -> tokens generated or trained on."""


def prompts(batch: int, seed: int) -> list[list[int]]:
    import random

    rng = random.Random(seed)
    return [[rng.randrange(10, VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


# -- engines: each function loads a model and returns what runs one batch --


def stretto(model: str, dtype: str) -> tuple[Round, float]:
    import torch

    from stretto.base.runtime import keep_freed_memory
    from stretto.inference.embedded.core import CoreSettings, EngineCore
    from stretto.models.hub import load_model

    keep_freed_memory()
    torch.set_num_threads(1)
    network = load_model(Path(model), dtype=getattr(torch, dtype), device="cpu")
    settings = CoreSettings(kv_cache_tokens=CACHE_TOKENS, max_model_len=512, enable_prefix_caching=False)
    core = EngineCore(network, settings)

    def run(batch: int, seed: int) -> int:
        import numpy as np

        from stretto.records.generate import GenerateRequest, SamplingParams

        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=seed)
        for i, ids in enumerate(prompts(batch, seed)):
            asked = GenerateRequest(
                request_id=f"{batch} {seed} {i}", prompt_ids=np.array(ids, np.int32), sampling=sampling
            )
            core.submit(core.build_request(asked))
        while core.has_work:
            core.step()
        return batch * NEW_TOKENS

    return run, core.cache.blocks.nbytes / 1e6


def transformers(model: str, dtype: str) -> tuple[Round, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(batch: int, seed: int) -> int:
        ids = torch.tensor(prompts(batch, seed))
        with torch.inference_mode():
            network.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0,
            )  # fmt: skip
        return batch * NEW_TOKENS

    return run, 0.0


def vllm(model: str, dtype: str) -> tuple[Round, float]:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model, dtype=dtype, max_model_len=512, max_num_seqs=64, enable_prefix_caching=False,
        enforce_eager=True, disable_log_stats=True,
    )  # fmt: skip

    def run(batch: int, seed: int) -> int:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, logprobs=0, seed=seed)
        asked = [{"prompt_token_ids": ids} for ids in prompts(batch, seed)]
        engine.generate(asked, sampling, use_tqdm=False)
        return batch * NEW_TOKENS

    return run, 1024.0


def llama_cpp(model: str, dtype: str) -> tuple[Round, float]:
    """One sequence per prompt in one context; `dtype` is what the file holds."""
    import ctypes
    import random

    import llama_cpp as lib

    lib.llama_backend_init()
    network = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
    how = lib.llama_context_default_params()
    how.n_ctx, how.n_batch, how.n_ubatch = CACHE_TOKENS, 64 * PROMPT_TOKENS, 512
    how.n_seq_max, how.n_threads, how.n_threads_batch = 64, 1, 1
    context = lib.llama_init_from_model(network, how)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(network))
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(0))
    assert vocab >= VOCAB
    batch_of = lib.llama_batch_init(64 * PROMPT_TOKENS, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        batch_of.n_tokens = len(rows)
        for i, (token, at, sequence, is_last) in enumerate(rows):
            batch_of.token[i], batch_of.pos[i], batch_of.n_seq_id[i] = token, at, 1
            batch_of.seq_id[i][0], batch_of.logits[i] = sequence, is_last
        if lib.llama_decode(context, batch_of):
            raise RuntimeError("llama_decode failed")

    def run(batch: int, seed: int) -> int:
        random.seed(seed)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        rows, last = [], []
        for k, ids in enumerate(prompts(batch, seed)):
            rows += [(token, at, k, at == PROMPT_TOKENS - 1) for at, token in enumerate(ids)]
            last.append(len(rows) - 1)
        decode(rows)
        for step in range(NEW_TOKENS):
            tokens = [lib.llama_sampler_sample(chain, context, ctypes.c_int32(at)) for at in last]
            if step < NEW_TOKENS - 1:
                decode([(token, PROMPT_TOKENS + step, k, True) for k, token in enumerate(tokens)])
                last = list(range(batch))
        return batch * NEW_TOKENS

    return run, 0.0


ENGINES = {"stretto": stretto, "transformers": transformers, "vllm": vllm, "llama.cpp": llama_cpp}


# -- processes --


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def serve(engine: str, model: str, dtype: str) -> None:
    """A worker: load, then read `batch seed` lines, run them and answer with what they took."""
    channel, sys.stdout = sys.stdout, sys.stderr
    if engine != "llama.cpp":
        import torch  # noqa: F401
    imports = peak_mb()
    run, cache_mb = WORK[engine](model, dtype)
    print(json.dumps({"imports_mb": imports, "cache_mb": cache_mb}), file=channel, flush=True)
    for line in sys.stdin:
        batch, seed = map(int, line.split())
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = run(batch, seed)
        row = {"tokens": tokens, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(row | {"memory_mb": peak_mb()}), file=channel, flush=True)


class Worker:
    """A process with one engine."""

    def __init__(self, engine: str, model: str, dtype: str, python: str = sys.executable) -> None:
        words = [python, __file__, model, "--serve", engine, "--dtype", dtype]
        self.name, self.rounds = f"{engine} {dtype}", {}
        cpu = max(os.sched_getaffinity(0))
        self.child = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
        )  # fmt: skip
        self.facts = self._answer()

    def _answer(self) -> dict[str, float]:
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self.child.wait()}; run its --serve alone")
        return json.loads(line)

    def turn(self, batch: int, seed: int, *, counts: bool = True) -> None:
        print(batch, seed, file=self.child.stdin, flush=True)
        row = self._answer()
        self.facts["memory_mb"] = row.pop("memory_mb")
        if counts:
            self.rounds.setdefault(batch, []).append(row)

    def close(self) -> dict[str, Any]:
        self.child.stdin.close()
        self.child.wait()
        out: dict[str, Any] = {name: round(value) for name, value in self.facts.items()}
        for batch, rows in self.rounds.items():
            per = {u: [row["tokens"] / row[u] for row in rows] for u in ("cpu_s", "wall_s")}
            out[f"batch {batch}"] = {
                "tokens_per_cpu_s": round(statistics.median(per["cpu_s"]), 1),
                "tokens_per_s": round(statistics.median(per["wall_s"]), 1),
                "lowest_and_highest_per_cpu_s": [round(f(per["cpu_s"]), 1) for f in (min, max)],
            }
        return out


def take_turns(workers: list[Worker], batches: tuple[int, ...], rounds: int) -> dict[str, Any]:
    for batch in batches:
        for seed in range(rounds + 1):
            for worker in workers:
                worker.turn(batch, seed, counts=seed > 0)
    figures = {}
    for worker in workers:
        figures[worker.name] = worker.close()
        print(worker.name, figures[worker.name], flush=True)
    return figures


def decode(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    engines = ["stretto", "transformers"]
    from importlib.util import find_spec

    if find_spec("vllm"):
        engines.append("vllm")
    chosen = [name for name in engines if not args.engine or name in args.engine]
    workers = [Worker(name, args.model, dtype) for name in chosen]
    if args.llama_python:
        workers += [
            Worker("llama.cpp", path, Path(path).stem, args.llama_python) for path in args.gguf or ()
        ]
    return take_turns(workers, BATCHES, 1 if args.quick else args.rounds)


WORK = ENGINES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory of a checkpoint; in a worker of llama.cpp the GGUF file")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["decode", "train"], action="append")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--engine", action="append", help="only these")
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python")
    parser.add_argument("--gguf", action="append", help="the model as GGUF files")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    dtypes = args.dtype or ["float32", "bfloat16"]
    if args.serve:
        return serve(args.serve, args.model, dtypes[0])
    figures: dict[str, Any] = {}
    for dtype in dtypes:
        figures[f"decode {dtype}"] = decode(args, dtype)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
