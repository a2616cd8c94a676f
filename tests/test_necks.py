"""Necks: the feature pyramid by its definition, on maps of any size, over many backbones."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from rsnakit.models import ModelConfig, build_model
from rsnakit.necks import FPN, SCSE, Pyramid, as_maps

SIZES = {"odd": ((13, 9), (7, 5), (4, 3)), "one": ((5, 5), (5, 5), (5, 5)), "tall": ((24, 6), (12, 3), (3, 1))}


def grey(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", SIZES)
def test_fpn_by_its_definition(sizes):
    # Lin et al., 2017, figure 3, place by place: nearest neighbours take the coarse map's pixel at the same share of the way
    torch.manual_seed(0)
    fpn = FPN((3, 4, 5), 6).eval()
    maps = [grey(2, c, *size, seed=c) for c, size in zip((3, 4, 5), SIZES[sizes], strict=True)]
    with torch.no_grad():
        found = fpn(maps)
        merged = [F.conv2d(x, layer.weight, layer.bias) for x, layer in zip(maps, fpn.lateral, strict=True)]
        for fine in (1, 0):
            (h, w), (ch, cw) = merged[fine].shape[2:], merged[fine + 1].shape[2:]
            for row in range(h):
                for column in range(w):
                    merged[fine][:, :, row, column] += merged[fine + 1][:, :, row * ch // h, column * cw // w]
        for level, x, layer in zip(found, merged, fpn.smooth, strict=True):
            assert level.shape == (2, 6, *x.shape[2:])
            torch.testing.assert_close(level, F.conv2d(x, layer.weight, layer.bias, padding=1))


def test_scse_by_its_definition():
    # Roy, Navab & Wachinger, 2018: equations 1 to 4, with the sum of both
    torch.manual_seed(0)
    scse, x = SCSE(6), grey(2, 6, 3, 5)
    assert scse.squeeze.out_channels == 3
    with torch.no_grad():
        z = x.mean((2, 3))
        w1, w2, w3 = (layer.weight.flatten(1) for layer in (scse.squeeze, scse.excite, scse.place))
        channel = torch.sigmoid((z @ w1.T + scse.squeeze.bias).clamp(min=0) @ w2.T + scse.excite.bias)
        place = torch.sigmoid(torch.einsum("bchw,oc->bohw", x, w3) + scse.place.bias)
        torch.testing.assert_close(scse(x), x * channel[:, :, None, None] + x * place)


# What has no part in the maps of each backbone, from timm's source: what stands behind its last stage.
BEHIND = {
    "resnet18": (),
    "test_vit": (),  # its last norm is applied to every map
    "test_convnext": ("head.norm.",),
    "test_efficientnet": ("conv_head.", "bn2."),
    "mobilenetv3_small_050": ("conv_head.",),
    "inception_next_atto": ("head.",),  # its pooling cannot be left out, and a neck does not ask
    "xcit_nano_12_p8_224": ("cls_token", "cls_attn_blocks."),
    "hiera_tiny_224": ("head.norm.",),
    "swin_tiny_patch4_window7_224": (),
}


@pytest.mark.parametrize("backbone", BEHIND)
def test_a_neck_over_backbones_of_all_kinds(backbone):
    torch.manual_seed(0)
    model = build_model(ModelConfig(backbone=backbone, weights="none", neck="fpn", neck_channels=8, pooling="avg"))
    size = (
        model.backbone.pretrained_cfg["input_size"][1:] if backbone not in ("resnet18", "test_convnext") else (96, 64)
    )
    logits = model(grey(2, 1, *size))["cancer"]
    assert logits.shape == (2,) and torch.isfinite(logits).all()
    assert model.channels == 3 * 8 == model.head.in_features
    logits.sum().backward()
    # All that is trained has a gradient, and what is frozen is what the docstring says; timm's names stay.
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    frozen = [name for name, p in model.backbone.named_parameters() if not p.requires_grad]
    assert frozen == model.pyramid.unused
    expected = [name for name, _ in model.backbone.named_parameters() if name.startswith(BEHIND[backbone])]
    assert frozen == (expected if BEHIND[backbone] else [])
    kinds = {"global_pool": ""} if backbone != "inception_next_atto" else {}
    with torch.device("meta"):
        plain = timm.create_model(backbone, num_classes=0, **kinds)
    assert list(model.backbone.state_dict()) == list(plain.state_dict())


def test_the_maps_are_those_of_timms_features_only():
    torch.manual_seed(0)
    model = build_model(ModelConfig(backbone="resnet18", weights="none", neck="fpn", dropout=0.0)).eval()
    reference = timm.create_model("resnet18", features_only=True, in_chans=1, out_indices=(2, 3, 4)).eval()
    reference.load_state_dict(model.backbone.state_dict(), strict=True)
    x = grey(2, 1, 97, 65)  # whose maps have odd sizes
    with torch.no_grad():
        maps = reference((x - model.mean) / model.std)
        assert [tuple(m.shape[1:]) for m in maps] == [(128, 13, 9), (256, 7, 5), (512, 4, 3)]
        for ours, theirs in zip(model.pyramid(model.backbone, (x - model.mean) / model.std), maps, strict=True):
            torch.testing.assert_close(ours, theirs)
        expected = torch.cat([m.amax((2, 3)) for m in model.neck(maps)], 1)
        torch.testing.assert_close(model.features(x), expected)


def test_looking_at_the_maps_leaves_no_trace():
    backbone = timm.create_model("resnet18", in_chans=1, num_classes=0, global_pool="")
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    random = torch.get_rng_state()
    assert Pyramid(backbone).channels == [128, 256, 512]
    assert all(torch.equal(v, before[k]) for k, v in backbone.state_dict().items())  # batch statistics among them
    assert all(p.requires_grad for p in backbone.parameters()) and backbone.training
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("pooling", ["gem", "attention"])
def test_a_neck_in_half_precision_compiled_copied_and_with_views(pooling):
    torch.manual_seed(0)
    settings = {
        "backbone": "test_efficientnet",
        "weights": "none",
        "neck": "fpn_scse",
        "pooling": pooling,
        "views": "max",
    }
    model = build_model(ModelConfig(**settings)).eval()
    x, mask = grey(2, 3, 1, 64, 96), torch.tensor([[True, True, False], [True, False, False]])
    with torch.no_grad():
        full = model(x, view_mask=mask)["cancer"]
        with torch.autocast("cpu", torch.bfloat16):
            half = model(x, view_mask=mask)["cancer"]
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, full, rtol=0.1, atol=0.1)
        compiled = [torch.compile(model, backend="eager")] if pooling == "attention" else []
        for other in (copy.deepcopy(model), *compiled):
            torch.testing.assert_close(other(x, view_mask=mask)["cancer"], full)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(x, view_mask=mask)["cancer"], full, rtol=1e-4, atol=1e-4)
        assert torch.isfinite(copy.deepcopy(model).bfloat16()(x.bfloat16(), view_mask=mask)["cancer"]).all()


class Bare(nn.Module):
    pretrained_cfg: dict = {}  # noqa: RUF012
    num_features = 4


def test_what_gives_no_maps_is_refused():
    with pytest.raises(ValueError, match=r"this version of timm cannot take the maps of Bare's stages"):
        Pyramid(Bare())
    with pytest.warns(UserWarning):
        rgb_only = timm.create_model("csatv2", in_chans=1, num_classes=0, global_pool="")
    with pytest.raises(ValueError, match=r"neck: the maps of CSATv2's stages cannot be taken .*use neck='none'"):
        Pyramid(rgb_only)
    with pytest.raises(ValueError, match=r"Bare gives features \(1, 2, 3, 3\), expected 4 channels"):
        as_maps(torch.zeros(1, 2, 3, 3), Bare())
    with pytest.raises(ValueError, match=r"Bare gives a list of features, expected maps"):
        as_maps([torch.zeros(1)], Bare())
