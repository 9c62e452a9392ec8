"""The kernels in C against the same in float64, and that no row's bits depend on how rows are cut into passes."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto_native import library
from stretto_native.kernels import AttentionPass, Kernels

TOKENS = 77
HEADS = {(4, 2, 16), (6, 2, 64), (4, 1, 128), (4, 4, 32), (3, 1, 48)}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = library.find_library()
    if found is None:
        pytest.skip("needs a C compiler")
    return Kernels(found)


def inputs(heads: int, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
    """q, k and v side by side, cos and sin by position, weights of the norm."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((TOKENS, (heads + 2 * kv_heads) * dim), (TOKENS, dim), (TOKENS, dim), (dim,))
    return tuple(torch.randn(*size, generator=generator) for size in sizes)


def attend(kernels, shape, *, block_size=16, tokens_per_pass=TOKENS, threads=1, norm=True) -> Tensor:
    heads, kv_heads, dim = shape
    qkv, cos, sin, weight = inputs(*shape)
    num_blocks = -(-TOKENS // block_size)
    tables = np.arange(num_blocks, 0, -1).reshape(1, -1)
    cache, out = torch.zeros(2 * kv_heads, num_blocks + 1, block_size * dim), []
    for start in range(0, TOKENS, tokens_per_pass):
        positions = np.append(np.arange(start, min(start + tokens_per_pass, TOKENS)), 0)
        owners = np.zeros(len(positions), np.int64)
        owners[-1] = -1
        rows = torch.cat((qkv[start : start + tokens_per_pass], qkv[:1]))
        how = AttentionPass(
            rows=len(rows), heads=heads, kv_heads=kv_heads, head_dim=dim, block_size=block_size,
            num_blocks=num_blocks + 1, table_width=num_blocks, threads=threads, owners=owners.ctypes.data,
            positions=positions.ctypes.data, tables=tables.ctypes.data, cos=cos.data_ptr(), sin=sin.data_ptr(),
            eps=1e-6, scale=dim**-0.5,
        )  # fmt: skip
        result = kernels.attend(how, rows, *([weight, 2 * weight] if norm else [None, None]), cache)
        assert (result[-1] == 0).all(), "a padding row"
        out.append(result[:-1])
    return torch.cat(out)


def expected_attention(shape, *, norm=True) -> Tensor:
    heads, kv_heads, dim = shape
    qkv, cos, sin, weight = (x.double() for x in inputs(*shape))
    q, k, v = qkv.view(TOKENS, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norm:
        q, k = (w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) for x, w in ((q, weight), (k, 2 * weight)))
    q, k = (x * cos[:, None] + x.roll(dim // 2, -1) * sin[:, None] for x in (q, k))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * dim**-0.5
    scores.masked_fill_(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("shape", sorted(HEADS))
@pytest.mark.parametrize("norm", [True, False])
def test_attention(kernels, shape, norm):
    torch.testing.assert_close(
        attend(kernels, shape, norm=norm).double(), expected_attention(shape, norm=norm), atol=5e-5, rtol=0
    )


@pytest.mark.parametrize("shape", sorted(HEADS))
def test_attention_has_the_same_bits_however_tokens_are_cut_and_cached(kernels, shape):
    whole = attend(kernels, shape)
    assert torch.equal(attend(kernels, shape, threads=3), whole)
    for tokens in (1, 13, TOKENS):
        for block_size in (4, 8, 12, 16, 32, 48):
            cut = attend(kernels, shape, block_size=block_size, tokens_per_pass=tokens)
            assert torch.equal(cut, whole), (tokens, block_size)


@pytest.mark.parametrize("dim", [16, 64, 176])
def test_norm_and_gate(kernels, dim):
    x, weight = torch.randn(9, dim) * 3, torch.randn(dim)
    inverse = torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5).double(), x.double() * inverse * weight, atol=1e-5, rtol=1e-5
    )
    gate_up = torch.randn(9, 2 * dim) * 20
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -90.0, 0.0])
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(
        kernels.silu_product(gate_up).double(), gate / (1 + torch.exp(-gate)) * up, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("vocab", [1, 5, 16, 64, 1001])
def test_sampling_inverts_the_distribution_function(kernels, vocab):
    logits, u = torch.randn(50, vocab) * 3, np.random.default_rng(0).random(50)
    tokens, logprobs = kernels.sample(logits, u, None)
    reached = torch.softmax(logits.double(), -1).cumsum(-1).numpy()
    for row, token in enumerate(tokens):
        below = reached[row, token - 1] if token else 0.0
        assert below - 1e-6 <= u[row] <= reached[row, token] + 1e-6
    exact = torch.log_softmax(logits.double(), -1)[torch.arange(50), torch.from_numpy(tokens)]
    np.testing.assert_allclose(logprobs, exact, atol=3e-6)
    best, _ = kernels.sample(logits, u, np.ones(50, np.bool_))
    assert (best == logits.argmax(-1).numpy()).all()


def test_sampling_from_broken_logits_gives_a_token(kernels):
    tokens, logprobs = kernels.sample(torch.full((3, 20), torch.nan), np.array([0.0, 0.5, 0.99]), None)
    assert ((tokens >= 0) & (tokens < 20)).all() and np.isnan(logprobs).all()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stretto"


@pytest.mark.heavy
def test_the_library_is_compiled_once(kernels, empty_cache, monkeypatch):
    assert library.find_library.__wrapped__() is not None
    [made] = empty_cache.iterdir()
    monkeypatch.setattr(library, "_compile", None)  # would fail if it were called
    assert library.find_library.__wrapped__() is not None
    assert list(empty_cache.iterdir()) == [made]


@pytest.mark.parametrize(("compiler", "words"), [("no-such-compiler", "no C compiler"), ("false", "cannot compile")])
def test_without_a_compiler_there_are_no_kernels_and_the_log_says_so(compiler, words, empty_cache, monkeypatch, caplog):
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.INFO):
        assert library.find_library.__wrapped__() is None
    assert [words in record.message for record in caplog.records] == [True]
    assert not empty_cache.exists() or list(empty_cache.iterdir()) == []
