"""Views of a breast: pooled by their definitions, with padding that changes nothing."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from rsnakit.models import ModelConfig, build_model
from rsnakit.targets import VIEW_KINDS
from rsnakit.views import ViewPool

TINY = "test_efficientnet"
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.bool)
KINDS = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]])
POOLS = ("none", "mean", "max", "attention")


def build(**settings) -> nn.Module:
    """A small model whose attention over views, if any, is as if trained."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(backbone=TINY, weights="none", **settings))
    return unsettle(model).eval()


def unsettle(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "attention.score" in name or "embedding" in name:
                parameter.normal_()
    return module


def grey(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_views_are_averaged_and_padding_changes_nothing():
    torch.manual_seed(0)
    model = build()
    views = grey(3, 4, 1, 64, 32)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.bool)
    with torch.no_grad():
        logits = model(views, view_mask=mask, view_id=torch.zeros(3, 4, dtype=torch.long))["cancer"]
        # by the definition: features of single images, averaged by hand, through the head
        alone = torch.stack([model.features(v) for v in views])
        expected = [model.head(alone[b][mask[b]].mean(0)).item() for b in range(3)]
        assert logits.shape == (3,)
        np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-6)
        for filler in (0.0, 1.0, float("nan"), float("inf")):
            filled = torch.where(mask[..., None, None, None], views, torch.tensor(filler))
            torch.testing.assert_close(model(filled, view_mask=mask)["cancer"], logits)
        torch.testing.assert_close(model(views, view_mask=mask.float())["cancer"], logits)
        everything = model(views)["cancer"]
        torch.testing.assert_close(everything, model(views, view_mask=torch.ones(3, 4, dtype=torch.bool))["cancer"])
        assert not torch.allclose(everything[1:], logits[1:])


def test_a_breast_with_one_view_is_its_image():
    torch.manual_seed(0)
    model = build()
    images = grey(3, 1, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(images[:, None])["cancer"], model(images)["cancer"])


def test_a_breast_without_a_view_has_a_finite_logit():
    model = build()
    with torch.no_grad():
        logits = model(grey(2, 2, 1, 64, 32), view_mask=torch.tensor([[False, False], [True, False]]))["cancer"]
    assert logits[0].item() == pytest.approx(model.head.bias.item()) and torch.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["mean", "max", "attention"])
def test_pooling_over_views_by_its_definition(kind):
    torch.manual_seed(0)
    pool, features = unsettle(ViewPool(kind, 6)), grey(3, 4, 6)
    out = pool(features, MASK, KINDS).detach()
    for b in range(3):
        there, kinds = features[b][MASK[b]], KINDS[b][MASK[b]]
        if (
            kind == "attention"
        ):  # scores of the features with their kind's embedding added, weights of the features alone
            h = there + pool.embedding.weight[kinds]
            scores = (torch.tanh(pool.attention.hidden(h)) * torch.sigmoid(pool.attention.gate(h))) @ (
                pool.attention.score.weight[0]
            )
            expected = (scores.softmax(0)[:, None] * there).sum(0)
        else:
            expected = there.mean(0) if kind == "mean" else there.max(0).values
        torch.testing.assert_close(out[b], expected.detach())
    assert torch.equal(pool(features, torch.zeros(3, 4), KINDS), torch.zeros(3, 6))


@pytest.mark.parametrize("kind", POOLS)
def test_one_view_or_six_and_padding_at_any_place(kind):
    model = build(views=kind)
    with torch.no_grad():
        for views in (1, 2, 6):
            x, kinds = grey(2, views, 1, 64, 32), torch.arange(views).remainder(2).expand(2, -1)
            logits = model(x, view_mask=torch.ones(2, views), view_id=kinds)["cancer"]
            torch.testing.assert_close(model(x, view_id=kinds)["cancer"], logits)
            if views == 1:
                torch.testing.assert_close(logits, model(x[:, 0])["cancer"])
            # the same views among padding of NaN, in front and behind; the kinds of padding may be anything
            padded = torch.full((2, views + 2, 1, 64, 32), torch.nan)
            padded[:, 1:-1] = x
            mask = torch.zeros(2, views + 2, dtype=torch.bool)
            mask[:, 1:-1] = True
            ids = torch.full((2, views + 2), -1)
            ids[:, 1:-1] = kinds
            torch.testing.assert_close(model(padded, view_mask=mask, view_id=ids)["cancer"], logits)


@pytest.mark.parametrize("kind", POOLS)
def test_batch_statistics_and_gradients_are_those_of_the_real_views_alone(kind):
    padded = build(views=kind, dropout=0.0).train()
    alone = copy.deepcopy(padded)
    views = grey(3, 4, 1, 64, 32)
    filled = torch.where(MASK[..., None, None, None], views, torch.tensor(torch.nan))
    out = padded(filled, view_mask=MASK, view_id=KINDS)["cancer"]
    # by hand: the seven images in one batch, then each breast's features pooled alone
    features = alone.features(torch.cat([views[b][MASK[b]] for b in range(3)]))
    parts = features.split(MASK.sum(1).tolist())
    ids = [KINDS[b][MASK[b]][None] for b in range(3)]
    expected = torch.cat([alone.classify(f[None], view_id=i)["cancer"] for f, i in zip(parts, ids, strict=True)])
    torch.testing.assert_close(out, expected)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(padded.get_buffer(name), buffer, msg=name)
    out.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(padded.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", POOLS)
def test_a_batch_without_any_view_never_reaches_the_backbone(kind):
    model = build(views=kind).train()
    before = {k: v.clone() for k, v in model.named_buffers()}
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    x = torch.full((2, 3, 1, 64, 32), torch.nan)
    logits = model(x, view_mask=nothing, view_id=torch.zeros(2, 3, dtype=torch.long))["cancer"]
    torch.testing.assert_close(logits, model.head.bias.expand(2))
    logits.sum().backward()
    assert all(torch.equal(v, before[k]) for k, v in model.named_buffers())
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


def test_attention_over_views_tells_the_kinds_apart():
    model, x = build(views="attention"), grey(2, 2, 1, 64, 32)
    with torch.no_grad():
        cc_mlo, mlo_cc = (model(x, view_id=torch.tensor([ids, ids]))["cancer"] for ids in ([0, 1], [1, 0]))
        assert not torch.allclose(cc_mlo, mlo_cc)
        swapped = model(x.flip(1), view_id=torch.tensor([[1, 0], [1, 0]]))["cancer"]  # the order itself says nothing
    torch.testing.assert_close(swapped, cc_mlo)
    assert model.views.embedding.num_embeddings == len(VIEW_KINDS)
    # a new model is the mean
    new = build_model(ModelConfig(backbone=TINY, weights="none", views="attention"))
    torch.testing.assert_close(new.views(grey(3, 4, 256), MASK, KINDS), ViewPool("mean", 256)(grey(3, 4, 256), MASK))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"views='attention' asks which view is which: give view_id, \(B, V\) .*0 CC, 1 MLO"),
        ({"view_id": torch.zeros(2, 3).long()}, r"view_id has shape \(2, 3\), expected \(B, V\) = \(2, 4\)"),
        ({"view_id": torch.zeros(2, 4).long(), "view_mask": torch.ones(4, 2)}, r"view_mask has shape \(4, 2\)"),
        ({"view_id": torch.tensor([[0, 1, 2, 0]] * 2)}, r"view_id holds \[0, 1, 2\], expected 0 CC, 1 MLO"),
    ],
)
def test_wrong_views_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(views="attention")(grey(2, 4, 1, 64, 32), **arguments)


@pytest.mark.parametrize("kind", ["mean", "max", "attention"])
def test_views_in_half_precision_compiled_and_channels_last(kind):
    model = build(views=kind)
    x, ids = grey(3, 4, 1, 64, 32), KINDS
    with torch.no_grad():
        full = model(x, view_mask=MASK, view_id=ids)["cancer"]
        with torch.autocast("cpu", torch.bfloat16):
            half = model(x, view_mask=MASK, view_id=ids)["cancer"]
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, full, rtol=0.05, atol=0.05)
        other = copy.deepcopy(model).to(memory_format=torch.channels_last)
        torch.testing.assert_close(other(x, view_mask=MASK, view_id=ids)["cancer"], full, rtol=1e-4, atol=1e-4)
        if kind == "attention":  # the others are parts of it
            compiled = torch.compile(model, backend="eager")
            torch.testing.assert_close(compiled(x, view_mask=MASK, view_id=ids)["cancer"], full)
            torch.testing.assert_close(compiled(x[:2], view_mask=MASK[1:], view_id=ids[:2])["cancer"],
                                       model(x[:2], view_mask=MASK[1:], view_id=ids[:2])["cancer"])  # fmt: skip
        low = copy.deepcopy(model).bfloat16()(x.bfloat16(), view_mask=MASK, view_id=ids)["cancer"]
        assert low.dtype == torch.float32 and torch.isfinite(low).all()
