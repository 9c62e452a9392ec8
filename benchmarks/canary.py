"""What the canary of weight updates sees of a real model: rounding, and what a probe finds.

    python benchmarks/canary.py [--model DIR]

DIR: SmolLM2-135M-Instruct unless given (`python -m stretto.examples.smollm2.model` makes it). Mean differences of
log-probabilities of 64 random tokens, in nats:

- bfloat16 against float32, for the model and for its probe (all tensors scaled by `probe_scale`)
- the probe against the model
- the probe against one in which a kind of tensors stays behind, as in an engine that never loads it
- the model in bfloat16 against one whose first norm is one rounding behind, which sums of bits alone can see

And the time of these sums (weights/sums.py), which trainer and engine make each, in scorings of the tokens.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from stretto.models.attention import PackedLayout
from stretto.models.decoder import Decoder
from stretto.models.hub import export_tensors, load_model
from stretto.models.tensor_map import TensorSlice, as_whole_slices
from stretto.trainer.network import scaled
from stretto.trainer.publish.canary import fixed_tokens
from stretto.transports.weights.sums import GroupSums

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


def one_rounding_behind(model: Decoder) -> np.ndarray:
    """The scores of a model in bfloat16 with the first norm's weights one rounding smaller."""
    norm = model.model.blocks[0].input_layernorm.weight.data
    before = norm.clone()
    norm.view(torch.int16).sub_(1)
    scores = score(model)
    norm.copy_(before)
    return scores


def sums_in_scorings(model: Decoder) -> float:
    """The time of the sums of all tensors, as a multiple of that of the scores; best of three."""

    def timed(act: Callable[[], object]) -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    add_all = lambda: [None for _ in GroupSums().of(export_tensors(model))]
    return min(timed(add_all) for _ in range(3)) / min(timed(lambda: score(model)) for _ in range(3))


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
    print(f"{'a norm, by one rounding':<28}{np.abs(one_rounding_behind(rounded) - score(rounded)).mean():.3f}")
    for model, name in ((exact, "float32"), (rounded, "bfloat16")):
        print(f"{f'sums, in scorings, {name}':<28}{sums_in_scorings(model):.2f}")


if __name__ == "__main__":
    main()
