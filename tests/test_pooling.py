"""Pooling: by definition, in float32 under autocast, and attention that begins as the average."""

import copy

import numpy as np
import pytest
import torch

from rsnakit.pooling import AttentionPool, GeM, make_pool, weighted_mean


def grey(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def gem_by_hand(values: np.ndarray, p: float) -> float:
    values = np.maximum(values.astype(np.float64), 1e-6)
    return float((values**p).mean() ** (1 / p))


@pytest.mark.parametrize("constant", [1e-6, 1e-3, 50.0, 300.0, 6e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [1.0, 3.0, 6.0])
def test_gem_of_a_constant_map_is_the_constant(constant, dtype, p):
    # T09: in half precision the cube of 1e-6 is 0 and that of 50 infinite
    pool = GeM(p)
    maps = torch.full((2, 3, 4, 5), constant, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = pool(maps)
        out.sum().backward()
    expected = max(maps[0, 0, 0, 0].item(), 1e-6)  # as the type holds it
    assert out.dtype == torch.float32 and out.shape == (2, 3)
    np.testing.assert_allclose(out.detach().numpy(), expected, rtol=2e-6)
    assert torch.isfinite(maps.grad).all() and torch.isfinite(pool.p.grad)
    if maps[0, 0, 0, 0] > 1.001e-6:  # at and below eps nothing flows back
        np.testing.assert_allclose(maps.grad.float().numpy(), 1 / 20, rtol=5e-3)  # each of the 20 places counts alike


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_gem_and_its_gradients_against_float64(scale):
    # T09
    maps = grey(2, 3, 4, 5, seed=1).sub(0.2) * scale
    pool = GeM()
    maps.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = pool(maps)
    expected = [[gem_by_hand(maps[b, c].detach().numpy(), 3) for c in range(3)] for b in range(2)]
    np.testing.assert_allclose(out.detach().numpy(), expected, rtol=1e-5)
    out.sum().backward()
    step = 1e-4
    numeric = sum(
        (gem_by_hand(m, 3 + step) - gem_by_hand(m, 3 - step)) / (2 * step) for b in maps.detach().numpy() for m in b
    )
    assert pool.p.grad.item() == pytest.approx(numeric, rel=1e-3)
    place = np.unravel_index(int(maps[0, 0].argmax()), (4, 5))  # dy/dx = (x / y)^(p - 1) / n
    slope = (maps[0, 0][place].item() / expected[0][0]) ** 2 / 20
    assert maps.grad[0, 0][place].item() == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("kind", ["avg", "max", "gem", "attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_pool_of_a_constant_map_is_the_constant_in_float32(kind, dtype):
    # T09
    pool = make_pool(kind, 3)
    for constant in (1e-3, 300.0):
        maps = torch.full((2, 3, 5, 7), constant, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            out = pool(maps)
        assert out.dtype == torch.float32 and out.shape == (2, 3)
        torch.testing.assert_close(out, maps[..., 0, 0].float(), rtol=2e-5, atol=0)


def trained(channels: int = 6, hidden: int = 4) -> AttentionPool:
    torch.manual_seed(0)
    pool = AttentionPool(channels, hidden)
    with torch.no_grad():
        pool.score.weight.normal_()
    return pool


def test_attention_by_its_definition():
    # Ilse et al., 2018, equation 9: a_k = softmax over k of w · (tanh(V h_k) * sigmoid(U h_k)), z = sum of a_k h_k
    pool, maps = trained(), grey(2, 6, 3, 4) * 5
    out = pool(maps).detach().numpy()
    v, u, w = (tensor.detach().double().numpy() for tensor in (pool.hidden.weight, pool.gate.weight, pool.score.weight))
    bv, bu = pool.hidden.bias.detach().double().numpy(), pool.gate.bias.detach().double().numpy()
    for b in range(2):
        places = maps[b].double().numpy().reshape(6, -1).T  # (12, 6)
        scores = [float(w[0] @ (np.tanh(v @ h + bv) / (1 + np.exp(-(u @ h + bu))))) for h in places]
        weights = np.exp(scores) / np.sum(np.exp(scores))
        assert weights.max() > 1.2 * weights.min()
        np.testing.assert_allclose(out[b], weights @ places, rtol=1e-5)


def test_new_attention_is_the_average_and_learns():
    pool, maps = AttentionPool(6), grey(2, 6, 3, 4)
    out = pool(maps)
    torch.testing.assert_close(out, maps.mean((2, 3)))
    out.pow(2).sum().backward()
    assert pool.score.weight.grad.abs().max() > 0
    assert sum(p.numel() for p in AttentionPool(1280).parameters()) == 2 * 64 * 1281 + 64


def test_attention_under_autocast_is_attention_in_float32():
    pool, maps = trained(), grey(2, 6, 8, 8) * 2  # in half precision scores would be rounded to 8 bits
    expected = copy.deepcopy(pool).double()(maps.double())
    with torch.autocast("cpu", torch.bfloat16):
        out = pool(maps)
        out.sum().backward()
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    assert all(torch.isfinite(p.grad).all() for p in pool.parameters())
    half = copy.deepcopy(pool).bfloat16()(maps.bfloat16())
    assert half.dtype == torch.float32 and torch.isfinite(half).all()


def test_masked_vectors_get_no_weight():
    pool, x = trained(), grey(3, 5, 6)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    weights = pool.weights(x, mask)
    torch.testing.assert_close(weights[0, mask[0]], pool.weights(x[:1, mask[0]])[0])
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.0, 0.0, 1.0]))
    assert (weights[~mask] == 0).all()
    weighted_mean(x, weights).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in pool.parameters())
