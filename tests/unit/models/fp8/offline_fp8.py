"""A slow quantiser of checkpoints, block by block and without the code under test: what is published must equal it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
KEPT = ("lm_head", "embed_tokens", "norm", "mlp.gate.")
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def is_quantized(name: str) -> bool:
    """Whether a checkpoint of this kind has a weight in 8 bits."""
    return name.endswith(".weight") and not any(part in name for part in KEPT)


def quantise_offline(source: Path, target: Path, *, has_round_scales: bool = False) -> Path:
    """A copy of a model directory with one file, in 8 bits."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    quantization = QUANTIZATION | ({"scale_fmt": "ue8m0"} if has_round_scales else {})
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_quantized(name):
            tensors[name] = tensor
            continue
        values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
        rows, columns = (range(0, size, BLOCK) for size in tensor.shape)
        scales = torch.empty(len(rows), len(columns))
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                block = tensor[row : row + BLOCK, column : column + BLOCK].float()
                scale = block.abs().max() / 448
                if has_round_scales:
                    scale = torch.tensor(2.0 ** math.ceil(math.log2(scale)))
                scales[i, j] = scale
                values[row : row + BLOCK, column : column + BLOCK] = (block / scale).to(torch.float8_e4m3fn)
        tensors |= {name: values, f"{name}_scale_inv": scales}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
