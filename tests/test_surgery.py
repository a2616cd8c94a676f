"""Stems, pools and pads put into timm models: what is computed then, and that nothing else has changed."""

import contextlib
import copy
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.utils import reparameterize_model
from torch import nn

from rsnakit import families, stems, surgery
from rsnakit.models import ModelConfig, build_model


def make(name: str, **options) -> nn.Module:
    """A model in evaluation mode whose BatchNorm layers do something."""
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    return model


@torch.no_grad()
def maps(model: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Heights and widths of the pyramid in a real run."""
    levels = (
        model.forward_intermediates(x, intermediates_only=True) if hasattr(model, "forward_intermediates") else model(x)
    )
    return [tuple(level.shape[2:]) for level in levels]


def traces(model: nn.Module) -> tuple:
    """Everything about a model that a change that fails must leave as it was."""
    hooks = [list(module._forward_pre_hooks.items()) for module in model.modules()]
    attributes = [
        {k: v for k, v in vars(module).items() if isinstance(v, int | tuple | str | bool)} for module in model.modules()
    ]
    kinds = [type(module) for module in model.modules()]
    parameters = [(name, id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()]
    return hooks, attributes, kinds, parameters, repr(model), copy.deepcopy(getattr(model, "feature_info", None))


def test_the_known_answer():
    """Sizes worked out by hand: (1000 + 156 - 7) // 4 + 1 = 288 rows, pooled by 4; 70 + 8 - 7 + 1 = 72 columns."""
    model = timm.create_model("caformer_s18", in_chans=5, features_only=True)
    before = {key: (id(value), value.detach().clone()) for key, value in model.state_dict(keep_vars=True).items()}
    assert surgery.set_stem(model, stride=(4, 1), padding=(0, 4)) is model
    assert surgery.insert_pool(model, "stages_0.downsample", (4, 1)) is model
    assert surgery.pad_input(model, (0, 0, 78, 78), "reflect") is model
    with torch.no_grad():
        levels = model.eval()(torch.randn(1, 5, 1000, 70))
    assert [tuple(level.shape[2:]) for level in levels] == [(72, 72), (36, 36), (18, 18), (9, 9)]
    assert model.feature_info.reduction() == [(16, 1), (32, 2), (64, 4), (128, 8)]
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(id(after[key]) == number and torch.equal(after[key], value) for key, (number, value) in before.items())


# set_stem


def test_an_even_kernel_at_stride_1_is_padded_by_hand_the_same():
    model = make("test_convnext", in_chans=2)  # kernel 4, stride 4, no padding
    conv, x = model.stem[0], torch.randn(1, 2, 20, 24)
    surgery.set_stem(model, 1)
    assert torch.equal(conv(x), F.conv2d(F.pad(x, (1, 2, 1, 2)), conv.weight, conv.bias))
    surgery.set_stem(model, 2)
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, stride=2, padding=1))
    surgery.set_stem(model, 4)  # and back: nothing adds up
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, stride=4)) and not conv._forward_pre_hooks
    surgery.set_stem(model, padding=(0, 3))
    surgery.set_stem(model, padding=(0, 3))
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, stride=4, padding=(0, 3)))


@pytest.mark.parametrize(
    "name",
    ["test_resnet", "test_efficientnet", "test_byobnet", "test_mambaout", "test_nfnet", "starnet_s050"],
)
def test_every_second_pixel_of_stride_1_is_stride_2(name):
    """Kernel 3, padding 1: the windows of stride 2 are among those of stride 1."""
    model = make(name)
    conv = next(iter(stems.first_convolutions(model).values()))
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        coarse = conv(x)
        surgery.set_stem(model, 1)
        assert torch.allclose(conv(x)[..., ::2, ::2], coarse, atol=1e-6)


@pytest.mark.parametrize(
    "block", [timm.models.byobnet.RepVggBlock, timm.models.byobnet.MobileOneBlock, timm.models.fastvit.MobileOneBlock]
)
def test_branches_stay_aligned_and_fuse_to_the_same(block):
    model = nn.Sequential(block(3, 8, kernel_size=3, stride=2), nn.Conv2d(8, 4, 1)).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 33, 32)
    for stride, padding in ((1, None), ((2, 1), 0), (2, (3, 1)), (4, None)):
        surgery.set_stem(model, stride, padding)
        with torch.no_grad():
            expected = model(x)
            fused = reparameterize_model(model)
            assert torch.allclose(fused(x), expected, atol=1e-5)
        (conv,) = stems.first_convolutions(fused).values()
        assert conv.padding == ((1, 1), (0, 0), (3, 1), (0, 1))[(1, (2, 1), 2, 4).index(stride)]
    surgery.set_stem(fused, 1)  # a fused model can be changed too
    assert fused(x).shape[2:] == x.shape[2:]
    with torch.no_grad():
        assert torch.allclose(fused(x)[..., ::2, ::2], surgery.set_stem(model, 2, 1)(x), atol=1e-5)


class LooksFirst(nn.Module):
    """Asks for the image's values, so that no dry run works."""

    def __init__(self, body: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.body, self.norm = body, norm

    def forward(self, x):
        x = self.norm(x)
        if x.mean() > 9:
            x = x / 255
        return self.body(x)


def test_in_a_model_that_cannot_be_run_dry_the_stem_alone_is_changed():
    model, x = LooksFirst(make("resnet18", num_classes=0), nn.Identity()).eval(), torch.randn(1, 3, 40, 32)
    body = copy.deepcopy(model.body)
    surgery.set_stem(model, stride=1)
    with torch.no_grad():
        stem = F.conv2d(x, body.conv1.weight, stride=1, padding=3)
        expected = body.layer1(body.maxpool(body.act1(body.bn1(stem))))
        expected = body.layer4(body.layer3(body.layer2(expected))).mean((2, 3))
        assert torch.allclose(model(x), expected, atol=1e-5)


def test_a_model_that_cannot_be_run_dry_is_padded_before_a_norm_with_weights():
    model, x = LooksFirst(make("test_resnet"), nn.BatchNorm2d(3)).eval(), torch.randn(1, 3, 40, 32)
    with torch.no_grad():
        expected = model(F.pad(x, (1, 2, 3, 4)))
        assert torch.equal(surgery.pad_input(model, (1, 2, 3, 4))(x), expected)


@pytest.mark.parametrize("settings", [{}, {"pooling": "attention", "neck": "fpn_scse"}])
def test_a_whole_model_of_the_kit_takes_another_stem(settings):
    model = build_model(ModelConfig(backbone="test_efficientnet", weights="none", **settings)).eval()

    def strides():
        return {
            name: (module.stride, module.padding)
            for name, module in model.named_modules()
            if isinstance(module, nn.Conv2d)
        }

    before, x = strides(), torch.rand(2, 1, 64, 32)
    stem = model.backbone.conv_stem
    surgery.set_stem(model, 1)
    with torch.no_grad(), surgery.capture(model, "backbone.conv_stem") as seen:
        logits = model(x)
    assert {name for name, value in strides().items() if value != before[name]} == {"backbone.conv_stem"}
    by_hand = F.conv2d((x - model.mean) / model.std, stem.weight, stem.bias, stride=1, padding=1)
    assert torch.allclose(seen["backbone.conv_stem"], by_hand, atol=1e-5)
    assert logits["cancer"].shape == (2,) and logits["cancer"].isfinite().all()


def test_branches_of_odd_and_even_kernels_are_added_up():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Conv2d(1, 2, 4, stride=2, padding=1), nn.Conv2d(1, 2, 1, stride=2)

        def forward(self, x):
            return self.wide(x) + self.narrow(x)

    model, x = Net(), torch.randn(1, 1, 9, 10)
    for stride, wide, narrow in ((1, (1, 2, 1, 2), (0, 0, 0, 0)), (3, (2, 2, 2, 2), (1, 0, 1, 0))):
        surgery.set_stem(model, stride, None if stride == 1 else 2)
        by_hand = [
            F.conv2d(F.pad(x, pad), conv.weight, conv.bias, stride=stride)
            for conv, pad in ((model.wide, wide), (model.narrow, narrow))
        ]
        assert torch.allclose(model(x), sum(by_hand), atol=1e-6)


def test_tensorflows_padding_gives_way_to_one_that_is_given():
    model = make("tf_efficientnet_lite0", in_chans=1)
    conv, weight, x = model.conv_stem, model.conv_stem.weight, torch.randn(1, 1, 33, 35)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    surgery.set_stem(model, stride=(2, 1))
    assert (
        conv(x).shape[2:] == (17, 35) and type(conv) is timm.layers.Conv2dSame
    )  # the input over the stride, rounded up
    keys = list(model.state_dict())
    surgery.set_stem(model, padding=2)
    assert torch.equal(conv(x), F.conv2d(x, weight, stride=(2, 1), padding=2))
    assert model.conv_stem.weight is weight and any(p is weight for p in optimizer.param_groups[0]["params"])
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "neither a stride nor a padding"),
        ({"stride": 0}, "stride is 0"),
        ({"stride": "2"}, "stride is '2'"),
        ({"stride": (1, 2, 3)}, r"two: \(vertical, horizontal\)"),
        ({"padding": -1}, "padding is -1"),
        ({"stride": 2.0}, "stride is 2.0"),
        ({"stride": 1, "input_size": (1, 2, 3, 4)}, "input_size"),
        ({"stride": 160}, "the model is as it was"),  # a map of one pixel cannot be halved
    ],
)
def test_a_stem_that_cannot_be_is_refused_and_nothing_has_changed(options, says):
    model = surgery.set_stem(make("test_convnext"), 1)
    before = traces(model)
    with pytest.raises(ValueError, match=says):
        surgery.set_stem(model, **options)
    assert traces(model) == before


def test_an_interrupted_change_is_put_back(monkeypatch):
    model = make("tf_efficientnet_lite0")
    before = traces(model)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(surgery, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        surgery.set_stem(model, 1, 1)
    assert traces(model) == before


def test_models_of_one_size_are_refused_unless_made_to_resample():
    with torch.device("meta"):
        fixed = timm.create_model("vit_tiny_patch16_224", depth=2)
        free = timm.create_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True)
    with pytest.raises(ValueError, match=r"one size alone, \(224, 224\).*dynamic_img_size"):
        surgery.set_stem(fixed, 8)
    surgery.set_stem(free, 8)
    levels = free.eval().forward_intermediates(torch.empty(1, 3, 64, 96, device="meta"), intermediates_only=True)
    assert levels[-1].shape[2:] == (8, 12)
    assert surgery.reductions(free) == [(8, 8), (8, 8)]


def test_nothing_but_the_stem_has_changed():
    model = make("test_resnet").to(torch.bfloat16).train()
    model.layer1.eval()
    flags = [module.training for module in model.modules()]
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    surgery.pad_input(surgery.insert_pool(surgery.set_stem(model, 1), "layer2", 2), (1, 1, 2, 2))
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.eval()(torch.randn(1, 3, 32, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


# reductions


@pytest.mark.parametrize(
    ("name", "options", "stride"),
    [
        ("test_convnext", {}, 1),
        ("test_mambaout", {}, (1, 2)),  # (N, H, W, C)
        ("test_efficientnet", {"features_only": True}, (2, 1)),
        ("test_resnet", {"features_only": True, "out_indices": (1, 3)}, (4, 2)),
        ("test_vit", {"features_only": True}, 8),  # tokens
    ],
)
def test_the_true_reductions_are_those_of_a_real_run(name, options, stride):
    model, untouched = make(name, **options), make(name, **options)
    old = copy.deepcopy(list(untouched.feature_info))
    untouched.feature_info = copy.copy(model.feature_info)  # with the same dictionaries
    surgery.set_stem(model, stride)
    found = surgery.reductions(model)
    assert maps(model, torch.randn(1, 3, 128, 64)) == [(128 // v, 64 // h) for v, h in found]
    info = model.feature_info
    told = info.reduction() if options else [level["reduction"] for level in info]
    assert told == [v if v == h else (v, h) for v, h in found]
    assert list(untouched.feature_info) == old  # another model of the kind


def test_padding_does_not_blur_the_reductions():
    model = surgery.pad_input(make("test_resnet"), (30, 30, 100, 60))
    assert surgery.reductions(model, (3, 64, 48)) == surgery.reductions(make("test_resnet"))


def test_reductions_inside_of_another_model():
    net = nn.Sequential(nn.BatchNorm2d(3), make("test_resnet"))
    surgery.set_stem(net, (1, 2))
    assert [level["reduction"] for level in net[1].feature_info][:2] == [(1, 2), (2, 4)]
    assert surgery.reductions(net) == surgery.reductions(net[1])
    with pytest.raises(ValueError, match="no feature_info"):
        surgery.reductions(nn.Sequential(nn.Conv2d(1, 1, 3)))


# insert_pool


@pytest.mark.parametrize(("name", "last"), [("test_convnext", False), ("test_mambaout", True)])
def test_a_pool_is_the_two_halves_run_by_hand(name, last):
    model, x = make(name), torch.randn(2, 3, 128, 192)
    with torch.no_grad():
        half = model.stages[0](model.stem(x))
        half = half.permute(0, 3, 1, 2) if last else half
        pooled = F.avg_pool2d(half, (4, 3))
        expected = model.stages[1](pooled.permute(0, 2, 3, 1) if last else pooled)
        surgery.insert_pool(model, "stages.1", (4, 3))
        assert torch.allclose(model.stages[1](model.stages[0](model.stem(x))), expected, atol=1e-6)
        assert model(x).shape == (2, 1000)
    assert model.feature_info[1]["reduction"] == (32, 24)


def test_an_identity_is_replaced_and_its_hooks_go_on():
    model, seen = make("test_convnext"), []
    assert isinstance(model.norm_pre, nn.Identity)
    handle = model.norm_pre.register_forward_hook(lambda *given: seen.append(given[2].shape[2:]))
    surgery.insert_pool(model, "norm_pre", 2)
    model(torch.randn(1, 3, 64, 64))
    assert seen[-1] == (1, 1) and not isinstance(model.norm_pre, nn.Identity)
    handle.remove()
    seen.clear()
    model(torch.randn(1, 3, 64, 64))
    assert not seen


def test_a_pool_takes_a_modules_place():
    model, x = make("test_resnet"), torch.randn(1, 3, 64, 64)
    model.layer3.register_module("extra", nn.MaxPool2d(2))
    surgery.insert_pool(model, "layer3.extra", (2, 4), replace=True)
    with torch.no_grad():
        before = nn.Sequential(*list(model.layer3)[:-1])(torch.ones(1, 48, 8, 8))
        assert torch.equal(model.layer3(torch.ones(1, 48, 8, 8)), F.avg_pool2d(before, (2, 4)))
    assert model(x).shape == (1, 1000)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.join = nn.Conv2d(3, 4, 1), Join()

    def forward(self, x):
        x = self.stem(x)
        return self.join(x=x, gate=x.mean((2, 3), keepdim=True))


class Join(nn.Module):
    def forward(self, x, gate):
        return x * gate


def test_of_several_tensors_the_first_is_pooled_by_name_too():
    model, x = TwoInputs(), torch.randn(1, 3, 8, 8)
    stem = model.stem(x)
    expected = F.avg_pool2d(stem, 2) * stem.mean((2, 3), keepdim=True)
    assert torch.allclose(surgery.insert_pool(model, "join", 2)(x), expected)


@pytest.mark.parametrize(
    ("name", "where", "options", "says"),
    [
        ("test_convnext", "stages_1", {}, "near it: stages.1$"),
        ("test_convnext", "stags.1", {}, "near it: stages.1, "),
        ("test_convnext", "", {}, "no module '' inside of it"),
        ("test_convnext", "stages.1", {"replace": True}, "ConvNeXtStage with weights, which would be lost"),
        ("test_convnext", "head.fc", {}, "no height and width"),
        ("test_convnext", "stages.3", {"kernel": 99}, "larger than the maps .*which have 10 rows and 10 columns"),
        # 5 rows make one, which fits any number of rows; 10 make more.
        (
            "test_convnext",
            "stages.3.blocks.0.drop_path",
            {"kernel": (4, 1)},
            "320, 320.*inside a residual branch.*as it was",
        ),
        ("test_convnext", "stages.3.blocks.0.mlp", {"kernel": (1, 3)}, "320, 320.*inside a residual branch.*as it was"),
        ("test_convnext", "stages.3", {"kernel": "4x1"}, "kernel is '4x1'"),
        ("test_vit", "blocks.1", {}, "gets tokens of shape"),
        (
            "swin_tiny_patch4_window7_224",
            "layers.1",
            {},
            "224, 224.*one size .windows.*the model is as it was",
        ),  # windows of one size
        (
            "test_resnet",
            "layer1.0.drop_block",
            {},
            "160, 160.*inside a residual branch.*as it was",
        ),  # a shortcut does not get smaller
    ],
)
def test_a_pool_that_cannot_be_is_refused_and_nothing_has_changed(name, where, options, says):
    with torch.device("meta"):
        model = timm.create_model(name)
    before = traces(model)
    with pytest.raises(ValueError, match=says):
        surgery.insert_pool(model, where, **({"kernel": 2} | options))
    assert traces(model) == before


def test_a_second_pool_at_one_place_is_refused():
    model = make("test_convnext")
    for where in ("stages.1", "norm_pre"):
        surgery.insert_pool(model, where, (2, 1))
        with pytest.raises(ValueError, match="has a pool already"):
            surgery.insert_pool(model, where, (2, 1))


def test_a_module_that_is_not_called_gets_no_pool():
    model = TwoInputs()
    model.spare = nn.ReLU()
    with pytest.raises(ValueError, match="'spare' is not called"):
        surgery.insert_pool(model, "spare", 2)


# pad_input


@pytest.mark.parametrize(("name", "mode"), [("test_resnet", "zero"), ("test_convnext", "reflect")])
def test_the_input_is_padded_however_the_model_is_entered(name, mode):
    model, x = make(name), torch.randn(2, 3, 40, 48)
    padded = F.pad(x, (4, 12, 24, 0), mode="constant" if mode == "zero" else mode)
    ways = [model, model.forward_features, lambda x: model.forward_intermediates(x, intermediates_only=True)[0]]
    with torch.no_grad():
        expected = [way(padded) for way in ways]
        surgery.pad_input(model, (4, 12, 24, 0), mode)
        for way, result in zip(ways, expected, strict=True):
            assert torch.equal(way(x), result)
        surgery.pad_input(model, (0, 0, 8, 0), mode)  # another, not one more
        assert model.forward_features(x).shape == model.forward_features(x[:, :, :40]).shape
        surgery.pad_input(model, (0, 0, 0, 0))
        assert torch.equal(model(padded), expected[0])


@pytest.mark.parametrize("cls", [None, "hook", "fx", "getter"])
def test_the_input_is_padded_in_every_kind_of_features_only_model(cls):
    options = {"feature_cls": cls} if cls else {}
    model, x = make("test_resnet", features_only=True, out_indices=(0, 2), **options), torch.randn(1, 3, 48, 40)
    with torch.no_grad():
        expected = model(F.pad(x, (8, 16, 0, 16)))
        for got, wanted in zip(surgery.pad_input(model, (8, 16, 0, 16))(x), expected, strict=True):
            assert torch.equal(got, wanted)


def test_the_image_is_padded_before_the_stem_pads():
    model, x = make("test_convnext"), torch.randn(1, 3, 32, 32)
    conv = model.stem[0]
    for order in (0, 1):
        twin = copy.deepcopy(model)
        changes = [lambda m: surgery.set_stem(m, 1), lambda m: surgery.pad_input(m, (3, 3, 3, 3), "reflect")]
        for change in changes if order else changes[::-1]:
            change(twin)
        by_hand = F.conv2d(F.pad(F.pad(x, (3, 3, 3, 3), mode="reflect"), (1, 2, 1, 2)), conv.weight, conv.bias)
        assert torch.equal(twin.stem(x), model.stem[1](by_hand))
        alone = nn.Sequential(copy.deepcopy(conv))  # one module is given the image and pads
        for change in changes if order else changes[::-1]:
            change(alone)
        assert torch.equal(alone(x), by_hand)


@pytest.mark.parametrize(
    ("name", "pad", "mode", "says"),
    [
        ("test_resnet", (1, 2, 3), "zero", "four pixel numbers"),
        ("test_resnet", (1, 2, 3, -1), "zero", "four pixel numbers"),
        ("test_resnet", 4, "zero", "four pixel numbers"),
        ("test_resnet", (1, 1, 1, 1), "mirror", "'zero' or 'reflect'"),
        ("crossvit_tiny_240", (1, 1, 1, 1), "zero", r"patch_embed.1.proj \(it is scaled, cut or resized first\)"),
        ("test_vit", (16, 16, 16, 16), "zero", "before padding; the model is as it was"),
    ],
)
def test_a_pad_that_cannot_be_is_refused_and_nothing_has_changed(name, pad, mode, says):
    with torch.device("meta"):
        model = timm.create_model(name, **({"depth": ((1, 1, 0),) * 3} if name.startswith("crossvit") else {}))
    before = traces(model)
    with pytest.raises(ValueError, match=says):
        surgery.pad_input(model, pad, mode)
    assert traces(model) == before


def test_a_model_that_scales_its_input_first_is_refused():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = make("test_resnet")

        def forward(self, x):
            return self.backbone(x / 2)

    with pytest.raises(ValueError, match="pad the part of the model that gets them"):
        surgery.pad_input(Net(), (1, 1, 1, 1))


def test_a_model_of_one_size_takes_less_with_a_pad():
    with torch.device("meta"):
        model = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1)).eval()
    surgery.pad_input(model, (2, 2, 6, 2), "reflect")
    assert model(torch.empty(1, 3, 216, 220, device="meta")).shape == (1, 1000)
    assert [level["reduction"] for level in model.feature_info] == [4, 8, 16, 32]


def test_an_image_too_small_to_reflect_is_named():
    model = surgery.pad_input(make("test_resnet"), (0, 0, 200, 40), "reflect")  # more than the 160 rows it is tried on
    assert model(torch.randn(1, 3, 201, 30)).shape == (1, 1000)
    with pytest.raises(ValueError, match="200 rows and 30 columns cannot be reflected by 200 at the top"):
        model(torch.randn(1, 3, 200, 30))


# all three


def test_copies_and_pickles_go_on_alone():
    model, x = make("test_convnext"), torch.randn(1, 3, 64, 64)
    surgery.pad_input(surgery.insert_pool(surgery.set_stem(model, 1), "stages.1", (2, 1)), (3, 2, 1, 0), "reflect")
    with torch.no_grad():
        expected = model(x)
        twin, other = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(x), expected) and torch.equal(other(x), expected)
        surgery.set_stem(twin, 4)
        surgery.pad_input(twin, (0, 0, 0, 0))
        assert torch.equal(model(x), expected)
        assert twin.feature_info[0]["reduction"] == 4 and model.feature_info[0]["reduction"] == 1
        model.load_state_dict(timm.create_model("test_convnext").state_dict())  # strict


def test_compiled_afterwards_it_computes_the_same_and_before_it_is_refused():
    model, x = make("test_resnet"), torch.randn(1, 3, 64, 64)
    compiled = torch.compile(model, backend="eager")
    for change in (
        lambda m: surgery.set_stem(m, 1),
        lambda m: surgery.insert_pool(m, "layer2", 2),
        lambda m: surgery.pad_input(m, (1, 1, 1, 1)),
    ):
        with pytest.raises(ValueError, match="compiled already"):
            change(compiled)
        change(model)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled already"):
        surgery.set_stem(model, 2)
    with torch.no_grad():
        assert torch.equal(compiled(x), copy.deepcopy(compiled._orig_mod)._call_impl(x))


# the whole of timm; the expected outcome is what its source says of each

FIXED = {  # a position embedding, or windows, for one size
    "beit", "cait", "coat", "convit", "crossvit", "deit", "efficientformer", "efficientformer_v2", "efficientvit_msra",
    "gcvit", "hiera", "levit", "maxxvit", "mlp_mixer", "mvitv2", "nest", "pit", "sequencer", "swiftformer",
    "swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr", "tnt", "twins", "visformer",
    "vision_transformer_hybrid", "vision_transformer_relpos", "vitamin", "volo", "xcit",
}  # fmt: skip
LINEAR = {"gemma4_vit", "naflexvit"}  # patches are cut and go through a linear layer
STRIDE_1 = {"csatv2", "dla", "tresnet", "vgg"}  # nothing to halve
VALID = {
    "inception_resnet_v2",
    "inception_v3",
    "inception_v4",
    "nasnet",
    "pnasnet",
    "xception",
}  # not padded everywhere
OWN_SIZE = {"byoanet", "deepseek_vit", "inception_v3"}  # do not take 128 pixels


@pytest.mark.parametrize(
    "family",
    # A third of the quick ones in the fast tests, all others in the slow ones.
    [pytest.param(name, marks=() if name in families.QUICK[::6] else pytest.mark.slow) for name in families.SMALLEST],
)
def test_every_family_of_timm_takes_half_the_stride_or_says_why_not(family):
    name = families.SMALLEST[family]
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    weights = [(key, id(value)) for key, value in model.state_dict(keep_vars=True).items()]
    strides = {key: module.stride for key, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    reduction, first = model.feature_info[0]["reduction"], model.pretrained_cfg["first_conv"]
    first = {first} if isinstance(first, str) else set(first or stems.first_convolutions(model))
    stride = max((max(strides[key]) for key in first if key in strides), default=2)
    assert (stride == 1) == (family in STRIDE_1)
    why = "one size alone" if family in FIXED else "no convolution of .* sees the image" if family in LINEAR else None
    with pytest.raises(ValueError, match=why) if why else contextlib.nullcontext():
        surgery.set_stem(model, max(stride // 2, 1))
    assert [(key, id(value)) for key, value in model.state_dict(keep_vars=True).items()] == weights
    changed = {
        key for key, module in model.named_modules() if isinstance(module, nn.Conv2d) and module.stride != strides[key]
    }
    if why or stride == 1:
        assert not changed
        return
    assert changed == first  # as timm's source names them
    times = stride / (stride // 2)
    assert model.feature_info[0]["reduction"] == round(reduction / times)
    side = model.pretrained_cfg["input_size"][-1] if family in OWN_SIZE else 128
    x = torch.empty(1, 3, side, side, device="meta")
    level = model.forward_intermediates(x, intermediates_only=True)[0]
    assert abs(level.shape[2] - side * times / reduction) <= (4 if family in VALID else 0 if times == 2 else 0.99)


def test_the_table_of_families():
    table = families.try_families(["resnet", "vision_transformer_relpos", "naflexvit", "vgg"]).set_index("family")
    assert list(table["works"]) == [True, False, False, False]
    assert table.loc["resnet", ["model", "stem", "kernel", "stride", "halved", "before", "after"]].tolist() == [
        "test_resnet", "conv1.0", 3, 2, 1, 2, 1
    ]  # fmt: skip
    assert list(table["why"][1:]) == [
        "test_vit_relpos takes images of one size alone, (160, 160)",
        "no convolution of NaFlexVit sees the image",
        "its first convolution has stride 1 already",
    ]
    with pytest.raises(ValueError, match="no such family: resnett"):
        families.try_families(["resnett"])


@pytest.mark.slow
def test_the_number_of_families_that_work_and_that_are_refused():
    table = families.try_families()
    assert set(table.loc[~table["works"], "family"]) == FIXED | LINEAR | STRIDE_1
    assert len(families.QUICK) >= 60
    assert len(table) == 98 and table["works"].sum() == 98 - 30 - 2 - 4
