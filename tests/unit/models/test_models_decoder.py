"""Our decoder equals transformers' Qwen3, packed or alone, forward and backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from cases import families
from tiny import VOCAB, build_policy
from transformers import Qwen3Config, Qwen3ForCausalLM

from stretto.base.errors import DataError
from stretto.models.attention import PackedLayout
from stretto.models.config import parse_config, to_hf
from stretto.models.decoder import Decoder
from stretto.models.parts.rope import Angles, rotate

CPU = torch.device("cpu")
BOUNDS = (0, 5, 10, 47, 56)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
SHAPE = families.SHAPE | {"head_dim": 16, "max_position_embeddings": 128}


def build_pair(seed=0, **settings) -> tuple[Qwen3ForCausalLM, Decoder]:
    """The same random network twice, with weights large enough that errors show."""
    torch.manual_seed(seed)
    config = Qwen3Config(**({"rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": True} | SHAPE | settings))
    theirs = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = Decoder(parse_config(config.to_dict(), "test"))
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not missing and set(unexpected) <= {"lm_head.weight"}
    return theirs, ours


def random_ids(seed=3):
    return torch.randint(0, VOCAB, (BOUNDS[-1],), generator=torch.Generator().manual_seed(seed))


def our_logits(model, ids, layout):
    return model.hidden(ids, layout) @ model.output_weight.T


def their_logits(model, ids):
    """Each document alone."""
    parts = [model(input_ids=ids[a:b][None], use_cache=False).logits[0] for a, b in pairwise(BOUNDS)]
    return torch.cat(parts)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["tied", "untied", "bias", "no-gqa", "mqa", "rope-linear", "rope-yarn"],
)
def test_packed_logits_equal_transformers_on_each_document_alone(settings):
    theirs, ours = build_pair(**settings)
    ids = random_ids()
    with torch.no_grad():
        expected = their_logits(theirs, ids)
        packed = our_logits(ours, ids, PackedLayout(BOUNDS, CPU))
    assert expected.abs().max() > 1
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)


def test_packing_without_resetting_positions_is_noticed():
    """The control of the test above: it would fail if documents could see each other."""
    theirs, ours = build_pair()
    ids = random_ids()
    with torch.no_grad():
        leaking = our_logits(ours, ids, PackedLayout((0, BOUNDS[-1]), CPU))
        assert (leaking - their_logits(theirs, ids)).abs().max() > 0.5


def test_loss_and_gradients_equal_transformers():
    theirs, ours = build_pair()
    ids = random_ids()
    losses = []
    for model, logits in (
        (theirs, their_logits(theirs, ids)),
        (ours, our_logits(ours, ids, PackedLayout(BOUNDS, CPU))),
    ):
        losses.append(F.cross_entropy(logits[:-1], ids[1:]))
        losses[-1].backward()
        assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=1e-6)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5, rtol=1e-4)


def test_bfloat16_stays_near_float32():
    _, ours = build_pair()
    ids, layout = random_ids(), PackedLayout(BOUNDS, CPU)
    with torch.no_grad():
        exact = our_logits(ours, ids, layout)
        rough = our_logits(ours.to(torch.bfloat16), ids, layout).float()
    assert 0 < (rough - exact).abs().mean() < 0.03 * exact.abs().mean()


def test_asking_for_some_rows_gives_the_same_rows_and_gradients():
    policy = build_policy()
    ids, layout = random_ids(), PackedLayout(BOUNDS, CPU)
    rows = torch.tensor([0, 3, 9, 10, 46, 55])
    grads = []
    for hidden in (policy.hidden(ids, layout, rows), policy.hidden(ids, layout)[rows]):
        policy.zero_grad()
        (hidden**2).sum().backward()
        grads.append([hidden, *(p.grad.clone() for p in policy.parameters() if p.grad is not None)])
    for some, every in zip(*grads):
        torch.testing.assert_close(some, every, atol=1e-4, rtol=1e-4)


def test_a_row_is_the_same_bits_again():
    policy, ids, layout = build_policy(), random_ids(), PackedLayout(BOUNDS, CPU)
    assert torch.equal(policy.hidden(ids, layout), policy.hidden(ids, layout))


def test_config_survives_the_way_through_config_json():
    for settings in ({}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}):
        _, ours = build_pair(**settings)
        assert parse_config(to_hf(ours.config), "test") == ours.config


def test_config_of_transformers_4_is_understood():
    hf = to_hf(build_policy().config)
    old = {k: v for k, v in hf.items() if k != "rope_parameters"} | {"rope_theta": 5e5, "rope_scaling": None}
    assert parse_config(old, "test").rope.theta == 5e5
    scaled = old | {"rope_scaling": {"type": "linear", "factor": 3.0}}
    assert parse_config(scaled, "test").rope.factor == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen3_next"}, "qwen3_next.*known: .*qwen3.*impl"),
        ({"hidden_size": None}, "no value for hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "needs a factor"),
    ],
)
def test_a_config_that_is_not_computed_here_is_refused(change, words):
    with pytest.raises(DataError, match=words):
        parse_config(to_hf(build_policy().config) | change, "config.json")


def test_the_gradient_of_a_rotation_turns_back():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 5, 1, 4, generator=generator, dtype=torch.float64)
    angles = Angles(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles), (x,))
    assert torch.equal(rotate(x, angles), rotate(x.detach(), angles))
