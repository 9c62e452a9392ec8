"""A family's own mixer needs no line of the core: the decoder and the engine find it, and its cache, by its `Mixer`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_runs import VOCAB, ask, build_core, packed_logprobs, prompt, run
from torch import nn

from stretto.base.errors import ConfigError
from stretto.config.sections.model import ScratchSection
from stretto.families.shape import ATTENTION, NO_MIXER, Mixer
from stretto.models import hub
from stretto.models.attention import PackedLayout
from stretto.models.config import scratch_config
from stretto.models.decoder import Attention, Decoder

BOUNDS = (0, 4, 5, 11)
IDS = torch.arange(11) % VOCAB


class Halved(Attention):
    """Attention with half of each value."""

    def mix(self, layer, q, k, v, attend):
        return super().mix(layer, q, k, v / 2, attend)


@dataclass(frozen=True)
class Sums:
    """The rows of each sequence, and its key among the sums before them; None: they begin at 0."""

    rows: list[tuple[list[int], int | None]]
    sums: dict[tuple[int, int], torch.Tensor]
    """By layer and key."""
    layer: int = 0

    def at(self, layer):
        return replace(self, layer=layer)


class Running(nn.Module):
    """The sum of what a linear layer makes of a document's tokens up to each of them."""

    def __init__(self, cfg, layer):
        super().__init__()
        self.in_proj = nn.Linear(cfg.hidden_size, cfg.mixer_of(layer).shape, bias=False)
        self.out_proj = nn.Linear(cfg.mixer_of(layer).shape, cfg.hidden_size, bias=False)

    @staticmethod
    def documents(tree, device, heads=None):
        assert heads is None
        bounds = tree.bounds.tolist()
        return Sums([(list(range(a, b)), None) for a, b in pairwise(bounds)], {})

    def forward(self, x, documents, rows):
        x, summed = self.in_proj(x), torch.zeros(len(x), self.in_proj.out_features)
        for places, key in documents.rows:
            at = (documents.layer, key)
            summed[places] = documents.sums.get(at, 0) + x[places].cumsum(0)
            if key is not None:
                documents.sums[at] = summed[places[-1]]
        out = self.out_proj(summed)
        return out if rows is None else out.index_select(0, rows)


class RunningStates:
    """The sums of an engine's slots."""

    def __init__(self, model, *, max_sequences, is_exact):
        self.max_sequences, self.sums = min(max_sequences, 3), {}

    def documents(self, owners, positions):
        new = set(owners[positions == 0].tolist())
        for at in [at for at in self.sums if at[1] in new]:
            del self.sums[at]
        return Sums([(np.flatnonzero(owners == owner).tolist(), owner) for owner in set(owners.tolist())], self.sums)

    def copy(self, source, target):
        for here, there in zip(source.tolist(), target.tolist()):
            self.sums |= {(layer, there): found for (layer, slot), found in self.sums.items() if slot == here}


HALVED = Mixer("halved", f"{__name__}:Halved")
RUNNING = Mixer("running", f"{__name__}:Running", 12, states=f"{__name__}:RunningStates")


def build(*mixers: Mixer) -> Decoder:
    shape = scratch_config(ScratchSection(family="llama", num_layers=3), VOCAB)
    without_mlp = tuple(layer for layer, mixer in enumerate(mixers) if mixer == RUNNING)
    model = hub.build_model(replace(shape, mixers=mixers, layers_without_mlp=without_mlp), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    return model


def hidden(model: Decoder, bounds=BOUNDS) -> torch.Tensor:
    with torch.no_grad():
        return model.hidden(IDS[: bounds[-1]], PackedLayout(bounds, IDS.device))


def test_a_mixer_is_built_and_called_as_attention_is():
    model, plain = build(HALVED, ATTENTION, HALVED), build(ATTENTION, ATTENTION, ATTENTION)
    assert (hidden(model) - hidden(plain)).abs().max() > 0.01, "the control"
    with torch.no_grad():
        for layer in (0, 2):
            plain.model.layers[layer].self_attn.v_proj.weight.mul_(0.5)
    torch.testing.assert_close(hidden(model), hidden(plain), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mixers", [(HALVED, ATTENTION, NO_MIXER), (RUNNING, ATTENTION, RUNNING)])
def test_an_engine_computes_what_the_decoder_does(mixers):
    model = build(*mixers)
    alone = torch.cat([hidden(model, (0, 4)), model.hidden(IDS[4:5], PackedLayout((0, 1), IDS.device)).detach()])
    torch.testing.assert_close(hidden(model)[:5], alone, atol=1e-5, rtol=1e-5)
    core = build_core(model)
    assert core.max_num_seqs == (3 if RUNNING in mixers else 64)
    ids = [prompt(np.random.default_rng(0), length) for length in (5, 20)]
    specs = [ask(f"r{i}", each, seed=i, n=2, max_tokens=6) for i, each in enumerate(ids)]
    for each, completions in zip(ids, run(core, *specs, is_audited=False)):
        for completion in completions:
            expected = packed_logprobs(model, np.concatenate((each, completion.token_ids)))[len(each) - 1 :]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("module", ["stretto.models.decoder:Missing", "no_such_package.mix:Mixer", ""])
def test_a_mixer_whose_code_is_not_there_is_named(module):
    cfg = scratch_config(ScratchSection(num_layers=1), VOCAB)
    with pytest.raises(ConfigError, match=f"an add-on names `{module}`.* uninstall the package"):
        Decoder(replace(cfg, mixers=(Mixer("own", module),)))
