"""Mixup and CutMix, against the mixing written out here."""

import numpy as np
import pytest
import torch

from rsnakit.losses import training_loss
from rsnakit.mixing import Mix, partners


def images(n, dtype=torch.float32, height=12, width=8):
    return torch.rand(n, 1, height, width, generator=torch.Generator().manual_seed(n)).to(dtype)


def partner(i, n):
    """Its number in a batch of n: the batch is turned round, without the last one where n is odd."""
    even = n // 2 * 2
    return even - 1 - i if i < even else i


@pytest.mark.parametrize("n", [2, 5, 8, 9])
@pytest.mark.parametrize("seed", range(5))
def test_mixup_is_the_sum_in_shares(n, seed):
    before, x = images(n), images(n)
    np.random.seed(seed)
    lam = Mix(0.4, 0.0)(x)
    assert isinstance(lam, float) and 0 <= lam <= 1
    for i in range(n):
        torch.testing.assert_close(x[i], lam * before[i] + (1 - lam) * before[partner(i, n)])
    if n % 2:
        torch.testing.assert_close(x[-1], before[-1])


@pytest.mark.parametrize("n", [2, 5, 8, 9])
@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5])  # 1 draws an empty rectangle
def test_cutmix_puts_one_rectangle_of_the_partner_in(n, seed):
    before, x = images(n), images(n)
    np.random.seed(seed)
    lam = Mix(0.0, 1.0)(x)
    changed = (x[0, 0] != before[0, 0]).nonzero()
    (top, left), (bottom, right) = changed.min(0).values, changed.max(0).values + 1
    expected = before.clone()
    for i in range(n):
        expected[i, :, top:bottom, left:right] = before[partner(i, n), :, top:bottom, left:right]
    assert torch.equal(x, expected)
    assert lam == pytest.approx(1 - float((bottom - top) * (right - left)) / (12 * 8))  # the share of pixels kept


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_partners_are_the_labels_of_the_images_mixed_in(n):
    labels = {"cancer": torch.arange(n), "density": torch.arange(n) / 2.0}
    labels["density"][-1] = float("nan")
    found = partners(labels)
    order = [partner(i, n) for i in range(n)]
    assert found["cancer"].tolist() == order and found["cancer"].dtype == labels["cancer"].dtype
    torch.testing.assert_close(found["density"], labels["density"][order], equal_nan=True)
    assert labels["cancer"].tolist() == list(range(n))  # the given ones stay


def test_the_share_is_drawn_from_the_beta_distribution_that_alpha_names():
    for alpha in (0.2, 1.0, 4.0):
        np.random.seed(0)
        shares = np.array([Mix(alpha, 0.0)(torch.zeros(2, 1, 1, 1)) for _ in range(4000)])
        assert shares.mean() == pytest.approx(0.5, abs=0.03)
        assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)


def test_both_come_where_both_are_on():
    mix = Mix(0.5, 1.0)
    np.random.seed(0)
    kinds = []
    for _ in range(200):
        x = torch.stack([torch.zeros(1, 8, 8), torch.ones(1, 8, 8)])
        lam = mix(x)
        if 0 < lam < 1:
            kinds.append(len(x[0].unique()) == 1)  # one value all over is mixup's
    assert 0.4 < np.mean(kinds) < 0.6


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_mixed_as_float32_is_and_keeps_its_type(seed, dtype):
    for how in ((0.4, 0.0), (0.0, 1.0)):
        x, exact = images(5, dtype), images(5, dtype).float()
        np.random.seed(seed)
        lam = Mix(*how)(x)
        np.random.seed(seed)
        assert Mix(*how)(exact) == lam
        assert x.dtype == dtype
        torch.testing.assert_close(x.float(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_one_image_is_not_mixed_and_nothing_is_where_all_is_off():
    x, before = images(1), images(1)
    assert Mix(0.4, 1.0)(x) == 1.0 and torch.equal(x, before)
    x, before = images(4), images(4)
    assert Mix(0.0, 0.0)(x) == 1.0 and torch.equal(x, before)


def test_the_same_numbers_are_drawn_after_the_same_state():  # C04
    """Of numpy's global generator, which the loop keeps in its checkpoints."""
    mix, shares = Mix(0.4, 1.0), []
    np.random.seed(3)
    mix(images(4))
    state = np.random.get_state()
    for _ in range(2):
        np.random.set_state(state)
        x = images(4)
        shares.append((mix(x), x))
    assert shares[0][0] == shares[1][0] and torch.equal(shares[0][1], shares[1][1])


def test_breasts_of_several_views_are_refused():
    with pytest.raises(ValueError, match="with views give mixup=0"):
        Mix(0.4, 0.0)(torch.zeros(4, 2, 1, 8, 8))


@pytest.mark.parametrize("how", [(0.4, 0.0), (0.0, 1.0)])
def test_mixing_waits_for_no_device(how):
    """Tensors of the meta device have no values that could be read."""
    x = torch.empty(5, 1, 16, 8, device="meta")
    assert 0 <= Mix(*how)(x) <= 1
    assert partners({"cancer": torch.empty(5, device="meta")})["cancer"].shape == (5,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device to wait for")
@pytest.mark.parametrize("how", [(0.4, 0.0), (0.0, 1.0)])
def test_mixing_waits_for_no_gpu(how):
    x, labels = images(5).cuda(), {"cancer": torch.arange(5).cuda()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        Mix(*how)(x)
        partners(labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["bce", "focal"])
def test_the_loss_of_both_labels_is_that_of_the_mixed_one(name):
    """These are straight lines in the label, as mixup's derivation has it: lam * loss(y) + (1 - lam) * loss(y')."""
    z = torch.tensor([0.3, -1.2, 2.0, 0.1])
    y, lam = torch.tensor([1.0, 0.0, 0.0, 1.0]), 0.3

    def loss(labels):
        return float(training_loss({"cancer": z}, {"cancer": labels}, loss=name, positive_target=0.9))

    both = lam * loss(y) + (1 - lam) * loss(partners({"cancer": y})["cancer"])
    assert both == pytest.approx(loss(lam * y + (1 - lam) * y.flip(0)), rel=1e-5)


def test_channels_last_images_stay_so():
    x = torch.rand(4, 2, 8, 8).contiguous(memory_format=torch.channels_last)
    Mix(0.4, 0.0)(x)
    assert x.is_contiguous(memory_format=torch.channels_last)
