"""A small model with real weights: decoding and training beside other engines and libraries, in float32 and bfloat16.

    python benchmarks/real.py MODEL [--quick] [--part decode|train|lora] [--dtype float32|bfloat16]
                              [--llama-python PYTHON --gguf FILE]

MODEL is a directory with a checkpoint, such as SmolLM2-135M-Instruct. Every engine is a process of its own with one
thread on one processor; all stay loaded and take turns, a batch each, so that whatever else the machine does falls on
all.

decode: prompts of 40 tokens, 32 new ones per prompt, sampled at temperature 1, at batches of 1, 16 and 64. llama.cpp
runs in a Python that has `llama-cpp-python`, on GGUF files of the model. train: steps of a policy gradient over 16 rows
of 40 tokens of prompt and 32 of completion, then over rows whose completions differ in length, beside the loop one
first writes with transformers: padded rows, logits of the completions only. lora: the same with adapters of rank 16,
beside peft.

`tokens_per_cpu_s` is what to trust on a busy machine. memory_mb is the peak of the process, imports_mb what it had
before the model was loaded, cache_mb the cache that was asked for. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
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


# -- trainers: each function returns what runs one step; `batch` is 0 for equal lengths, 1 for lengths that differ --

ROWS, ROW_TOKENS = 16, 1152
KINDS = ("equal lengths", "lengths that differ")


def completions(kind: int, seed: int) -> list[list[int]]:
    """Rows of a prompt and a completion; half of their rewards are 1, half -1 (by position)."""
    import random

    rng = random.Random(seed)
    lengths = [NEW_TOKENS] * ROWS
    if kind:
        lengths = [min(max(4, int(rng.lognormvariate(3.2, 0.8))), 200) for _ in range(ROWS)]
    return [[rng.randrange(10, VOCAB) for _ in range(PROMPT_TOKENS + length)] for length in lengths]


def learner(model: str, dtype: str, lora: bool = False) -> tuple[Round, float]:
    import numpy as np
    import torch

    from stretto.base.runtime import keep_freed_memory
    from stretto.config.sections.algorithm import PpoLoss
    from stretto.config.sections.model import LoRASection, ModelSection
    from stretto.config.sections.trainer import AdamWOptim, ConstantScheduler
    from stretto.models.hub import load_model
    from stretto.records.sample import MicroBatch
    from stretto.trainer.learner import Learner

    keep_freed_memory()
    torch.set_num_threads(1)
    policy = load_model(Path(model), dtype=getattr(torch, dtype), device="cpu")
    section = ModelSection(lora=LoRASection() if lora else None, dtype=dtype)
    one = Learner(
        policy, model=section, optim=AdamWOptim(lr=1e-6), scheduler=ConstantScheduler(), max_steps=None,
        loss=PpoLoss(),
    )  # fmt: skip

    def packed(rows: list[list[int]], signs: list[float]) -> MicroBatch:
        ids = np.concatenate([np.array(row, np.int32) for row in rows])
        is_completion = np.concatenate([np.arange(len(row)) >= PROMPT_TOKENS for row in rows])
        signs_by_token = np.repeat(np.array(signs, np.float32), [len(row) for row in rows])
        return MicroBatch(
            token_ids=ids, cu_seqlens=np.cumsum([0, *map(len, rows)]).astype(np.int32), loss_mask=is_completion,
            logprobs=np.where(is_completion, np.nan, 0).astype(np.float32), advantages=signs_by_token,
            temperatures=np.ones(len(ids), np.float32), sample_ids=tuple(map(str, range(len(rows)))),
            envs=("",) * len(rows),
        )  # fmt: skip

    def run(kind: int, seed: int) -> int:
        rows = completions(kind, seed)
        signs = [1.0 if i % 2 else -1.0 for i in range(len(rows))]
        batches: list[list[int]] = []
        for i in sorted(range(len(rows)), key=lambda i: -len(rows[i])):
            fits = (b for b in batches if sum(len(rows[j]) for j in [*b, i]) <= ROW_TOKENS)
            batch = next(fits, None)
            batches.append([i]) if batch is None else batch.append(i)
        one.forward_backward([packed([rows[i] for i in b], [signs[i] for i in b]) for b in batches])
        run.loss = one.optim_step()["loss/mean"]
        return sum(map(len, rows))

    return run, 0.0


def plain_loop(model: str, dtype: str, lora: bool = False) -> tuple[Round, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).train()
    if lora:
        from peft import LoraConfig, get_peft_model

        network = get_peft_model(network, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def run(kind: int, seed: int) -> int:
        rows = completions(kind, seed)
        num_trained = sum(len(row) - PROMPT_TOKENS for row in rows)
        size, total = max(1, ROW_TOKENS // max(map(len, rows))), 0.0
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            longest = max(map(len, part))
            ids = torch.tensor([row + [0] * (longest - len(row)) for row in part])
            is_token = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part])
            keep = longest - PROMPT_TOKENS + 1
            logits = network(ids, attention_mask=is_token, use_cache=False, logits_to_keep=keep).logits[:, :-1]
            targets = ids[:, PROMPT_TOKENS:]
            logprobs = logits.float().log_softmax(-1).gather(2, targets[:, :, None]).squeeze(2)
            signs = torch.tensor([[1.0 if (start + i) % 2 else -1.0] for i in range(len(part))])
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -torch.minimum(ratio * signs, ratio.clamp(0.8, 1.2) * signs)
            loss = (loss * is_token[:, PROMPT_TOKENS:]).sum() / num_trained
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.loss = total
        return sum(map(len, rows))

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
        loss = getattr(run, "loss", None)
        row = {} if loss is None else {"loss": loss}
        row |= {"tokens": tokens, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
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
            losses = {"loss": round(rows[-1]["loss"], 5)} if "loss" in rows[-1] else {}
            label = KINDS[batch] if losses else f"batch {batch}"
            out[label] = losses | {
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
        workers += [Worker("llama.cpp", path, Path(path).stem, args.llama_python) for path in args.gguf or ()]
    return take_turns(workers, BATCHES, 1 if args.quick else args.rounds)


def train(args: argparse.Namespace, dtype: str, names: tuple[str, str]) -> dict[str, Any]:
    workers = [Worker(name, args.model, dtype) for name in names if not args.engine or name in args.engine]
    return take_turns(workers, (0, 1), 1 if args.quick else args.rounds)


TRAINERS = {
    "trainer": learner,
    "plain loop": plain_loop,
    "trainer, LoRA": functools.partial(learner, lora=True),
    "peft": functools.partial(plain_loop, lora=True),
}
WORK = ENGINES | TRAINERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory of a checkpoint; in a worker of llama.cpp the GGUF file")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["decode", "train", "lora"], action="append")
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
    parts = args.part or ["decode", "train", "lora"]
    for dtype in dtypes:
        if "decode" in parts:
            figures[f"decode {dtype}"] = decode(args, dtype)
        if "train" in parts:
            figures[f"train {dtype}"] = train(args, dtype, ("trainer", "plain loop"))
        if "lora" in parts:
            figures[f"lora {dtype}"] = train(args, dtype, ("trainer, LoRA", "peft"))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
