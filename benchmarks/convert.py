"""`stretto convert` of a random model to Megatron's torch_dist and back: seconds, and the memory of each process.

    python benchmarks/convert.py [--quick]

The model is a qwen3 in bfloat16 of 2.0 GB (with --quick 0.27 GB). Memory is what the process has of its own, without
pages of files, which the system can take back: the highest of samples every 20 ms. What came back is compared bit for
bit. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from stretto.models import hub

CONVERT = ["-m", "stretto", "convert"]
CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1536, "intermediate_size": 6144,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_000, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "attention_bias": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a model of 0.27 GB")
    layers = 1 if parser.parse_args().quick else 24
    with tempfile.TemporaryDirectory() as directory:
        model, megatron, back = (Path(directory, name) for name in ("model", "megatron", "back"))
        num_bytes = write_model(model, layers)
        runs = {
            "imports": ["-c", "import torch.distributed.checkpoint, stretto.models.hub"],
            "to Megatron": [*CONVERT, str(model), str(megatron)],
            "to Hugging Face": [*CONVERT, str(megatron), str(back), "--model", str(model)],
        }
        found = {name: measured(words) for name, words in runs.items()}
        print(json.dumps({"bytes": num_bytes, **found, "different": num_different(model, back)}))


def write_model(directory: Path, layers: int) -> int:
    """Write a random model; its bytes."""
    directory.mkdir()
    config = CONFIG | {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    shapes = hub.build_tensor_map(hub.load_config(directory)).their_shapes
    generator = torch.Generator().manual_seed(0)
    random = lambda shape: torch.randn(shape, generator=generator).mul_(0.02).to(torch.bfloat16)
    tensors = ((name, random(shape)) for name, shape in shapes.items())
    hub.save_model_directory(torch.bfloat16, directory, None, config, tensors)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def measured(words: list[str]) -> dict[str, float]:
    """Seconds of a Python process, and the most memory that it had of its own, in MB."""
    start, most = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        text = Path(f"/proc/{process.pid}/status").read_text()
        most = max([most, *(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon"))])
        time.sleep(0.02)
    assert process.returncode == 0, words
    return {"s": round(time.perf_counter() - start, 1), "MB": round(most * 1024 / 1e6)}


def num_different(model: Path, back: Path) -> int:
    """How many tensors are not equal."""
    wanted, found = (dict((name, source) for name, _, source in hub.read_tensors(path)) for path in (model, back))
    return sum(name not in found or not torch.equal(found[name][...], source[...]) for name, source in wanted.items())


if __name__ == "__main__":
    main()
