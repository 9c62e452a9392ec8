"""What the canary of weight updates sees of a real model: rounding, and what a probe finds.

    python benchmarks/canary.py [--model DIR]

DIR: SmolLM2-135M-Instruct unless given (`python -m stretto.examples.smollm2.model` makes it). Mean differences of
log-probabilities of 64 random tokens, in nats:

- bfloat16 against float32, for the model and for its probe (all tensors scaled by `probe_scale`)
- the probe against the model
- the probe against one in which a kind of tensors stays behind, as in an engine that never loads it
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.hub import load_model
from stretto.models.tensor_map import TensorSlice, as_whole_slices
from stretto.trainer.network import scaled
from stretto.trainer.publish.canary import fixed_tokens

KINDS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")
DEFAULT = Path.home() / ".cache" / "stretto" / "smollm2-135m-instruct"


def score(model: Decoder) -> np.ndarray:
    """Log-probabilities of the canary's tokens, float32 [63]."""
    ids = torch.from_numpy(fixed_tokens(model.output_weight.shape[0], 64)).long()
    with torch.no_grad():
        hidden = model.hidden(ids, PackedLayout((0, len(ids)), ids.device))
        logits = (hidden @ model.output_weight.T).float()
    return torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()


def weights_of(model: Decoder) -> Iterable[TensorSlice]:
    return as_whole_slices(model.named_parameters()).values()


def stale(model: Decoder, kind: str) -> np.ndarray:
    """The scores of a probe in which tensors of one kind are not scaled."""
    kept = {n: p.detach().clone() for n, p in model.named_parameters() if kind in n}
    with scaled(weights_of(model)), torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in kept:
                parameter.copy_(kept[name])
        return score(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT)
    directory = parser.parse_args().model
    torch.set_num_threads(1)
    exact, rounded = (load_model(directory, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    plain = score(exact)
    print(f"{'rounding to bfloat16':<28}{np.abs(score(rounded) - plain).mean():.3f}")
    with scaled(weights_of(exact)), scaled(weights_of(rounded)):
        probe = score(exact)
        print(f"{'... of the probe':<28}{np.abs(score(rounded) - probe).mean():.3f}")
    print(f"{'what the probe moves':<28}{np.abs(probe - plain).mean():.3f}")
    for kind in KINDS:
        print(f"{f'stays behind: {kind}':<28}{np.abs(stale(exact, kind) - probe).mean():.3f}")


if __name__ == "__main__":
    main()
