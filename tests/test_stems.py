"""Which convolutions see the image, and the padding that keeps their maps at the input over the stride."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from rsnakit import stems
from rsnakit.hooks import StemPad, hook_of


def tiny(name: str, **options) -> nn.Module:
    """A model without weights, which need not be looked at."""
    with torch.device("meta"):
        return timm.create_model(name, **options)


# The names are those of the modules in timm's source.
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("test_resnet", {}, {"conv1.0"}),
        ("fastvit_t8", {"layers": (1, 1, 1, 1)}, {"stem.0.conv_kxk.0.conv", "stem.0.conv_scale.conv"}),
        (
            "crossvit_tiny_240",
            {"depth": ((1, 1, 0),) * 3},
            {"patch_embed.0.proj", "patch_embed.1.proj"},
        ),  # one sees it resized
        ("xcit_nano_12_p8_224", {"depth": 1}, {"patch_embed.proj.0.0"}),  # a later convolution sees positions only
        ("tresnet_m", {}, {"body.conv1.conv"}),  # behind a space-to-depth step
        ("csatv2", {}, {"stem_dct.conv_y", "stem_dct.conv_cb", "stem_dct.conv_cr"}),  # behind a cosine transform
        ("naflexvit_base_patch16_gap", {"depth": 1}, set()),  # a linear layer
    ],
)
def test_all_branches_that_see_the_image_are_found(name, options, expected):
    assert set(stems.first_convolutions(tiny(name, **options))) == expected


def test_all_branches_of_blocks_that_fuse_are_found():
    """timm's cfg names two: mobileone's first and its scale."""
    block = timm.models.byobnet.MobileOneBlock(3, 8, num_conv_branches=4, stride=2)
    found = {"0.conv_scale.conv", *(f"0.conv_kxk.{n}.conv" for n in range(4))}
    assert set(stems.first_convolutions(nn.Sequential(block, nn.Conv2d(8, 3, 1)))) == found


# M02: first_conv has another name in a features_only model.
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("caformer_s18", {}, ["stem.conv"]),
        ("test_convnext", {}, ["stem_0"]),
        ("test_resnet", {}, ["conv1.0"]),
        ("test_vit", {}, ["model.patch_embed.proj"]),
        ("test_resnet", {"feature_cls": "hook"}, ["body.conv1.0"]),
    ],
)
def test_found_in_features_only_models(name, options, expected):
    assert list(stems.first_convolutions(tiny(name, features_only=True, in_chans=1, **options))) == expected


def test_found_inside_of_another_model_that_scales_first():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.backbone = nn.BatchNorm2d(2), timm.create_model("test_resnet", in_chans=2)

        def forward(self, x):
            return self.backbone(self.norm(x * 2))

    model = Net().half()
    for parameter in model.parameters():
        parameter.requires_grad = False  # frozen
    model.backbone.layer1.eval()
    flags = [module.training for module in model.modules()]
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = stems.first_convolutions(model)
    assert found == {"backbone.conv1.0": model.backbone.conv1[0]}
    # No trace: flags, statistics, random numbers, hooks.
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class ByValue(nn.Module):
    """Cannot be run without values; takes one size of images with `size`."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.stem, self.rest, self.size = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3), size
        self.pretrained_cfg = {"input_size": (1, 32, 32), "first_conv": "stem"}

    def forward(self, x):
        if self.size and x.shape[-1] != self.size:
            raise RuntimeError("another size")
        x = self.stem(x)
        return self.rest(x) if float(x.sum()) < float("inf") else x


def test_a_model_that_computes_with_values_is_run_on_a_copy():
    model = ByValue()
    assert list(stems.first_convolutions(model)) == ["stem"]
    assert not any(module._forward_pre_hooks for module in model.modules())


class LooksFirst(nn.Module):
    """Asks for the image's values, so that it runs on a copy with weights that can be trained."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x):
        if x.mean() > 9:
            x = x / 255
        return self.body(x)


class Learns(nn.Module):
    """What stands between its convolutions has a gradient of many kinds, and comes from the image nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.stem, self.later = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.last, self.beside, self.pos_embed = (
            nn.Conv2d(8, 4, 1),
            nn.Conv2d(4, 4, 1),
            nn.Parameter(torch.ones(4, 1, 1)),
        )
        self.register_buffer("bias", torch.ones(4, 1, 1, requires_grad=True))
        self.scale = torch.ones((), requires_grad=True)  # no parameter
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.hidden = [nn.Conv2d(4, 4, 1)]  # which nobody knows

    def forward(self, x):
        tokens = self.attention(*[x.flatten(2).mT] * 3)[0].mT.unflatten(2, x.shape[2:])  # gives several results
        maps = self.stem(self.norm(x))
        maps = self.hidden[0](self.later(input=self.scale * (maps + self.pos_embed) + self.bias))
        maps = torch.cat([maps, self.beside(self.pos_embed.expand_as(maps)) + tokens.mean()], 1)
        return self.last(maps)


@pytest.mark.parametrize("frozen", [False, True])
def test_that_a_weight_has_a_gradient_does_not_make_a_first_convolution(frozen):
    model = LooksFirst(timm.create_model("resnet18", num_classes=0)).eval().requires_grad_(not frozen)
    assert list(stems.first_convolutions(model)) == ["body.conv1"]
    assert all(weight.requires_grad is not frozen for weight in model.parameters())
    assert list(stems.first_convolutions(LooksFirst(Learns()).requires_grad_(not frozen), (32, 32))) == ["body.stem"]


def test_a_model_that_does_not_run_is_asked_for_its_first_conv():
    model = ByValue(size=7)
    assert list(stems.first_convolutions(model)) == ["stem"]
    with pytest.raises(ValueError, match=r"ByValue cannot be run on .*\(1, 1, 32, 32\): another size; .*input_size"):
        stems.look(model)
    x, names = stems.look(ByValue(size=8), (8, 8))
    assert x.shape == (1, 1, 8, 8) and names == ["stem"]


def test_a_compiled_model_is_looked_into():
    assert list(stems.first_convolutions(torch.compile(tiny("test_resnet"), backend="eager"))) == ["conv1.0"]


def test_under_inference_mode():
    with torch.inference_mode():
        assert list(stems.first_convolutions(timm.create_model("test_resnet"))) == ["conv1.0"]


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_padding_keeps_maps_at_the_input_over_the_stride(kernel, dilation):
    extent = dilation * (kernel - 1) + 1
    for stride in range(1, 6):
        for own in range(4):
            conv = nn.Conv2d(1, 1, kernel, stride=2, padding=own, dilation=dilation)

            def exact(pads, stride=stride):
                return all((n * stride + sum(pads) - extent) // stride + 1 == n for n in range(2, 12))

            vertical, horizontal = stems.fitting_padding(conv, (stride, stride))
            assert vertical == horizontal and exact(vertical)
            if exact((own, own)):
                assert vertical == (own, own)
            else:
                even = [p for p in range(20) if exact((p, p))]
                total = min(t for t in range(40) if exact((t, 0)))
                assert vertical == ((even[0], even[0]) if even else (total // 2, total - total // 2))


def test_axes_are_padded_each_by_its_own_stride():
    conv = nn.Conv2d(1, 2, (7, 4), stride=4, padding=(2, 0))
    pads = stems.fitting_padding(conv, (4, 1))
    assert pads == ((2, 2), (1, 2))
    x = torch.randn(1, 1, 32, 24)
    stems.set_convolution(conv, (4, 1), pads)
    assert torch.equal(conv(x), F.conv2d(F.pad(x, (1, 2, 2, 2)), conv.weight, conv.bias, stride=(4, 1)))
    assert stems.padding_of(conv) == pads
    stems.set_convolution(conv, (4, 4), ((2, 2), (0, 0)))
    assert hook_of(conv, StemPad) is None and conv.padding == (2, 0)


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_the_convolutions_own_way_to_pad_is_kept(mode):
    conv = nn.Conv2d(2, 2, 4, stride=2, padding=1, padding_mode=mode, groups=2)
    x = torch.randn(1, 2, 12, 12)
    way = "constant" if mode == "zeros" else mode
    for stride, padding in ((1, 3), (4, 1)):  # uneven and even
        stems.set_convolution(conv, (stride, stride), stems.fitting_padding(conv, (stride, stride)))
        pads = (1, 2, 1, 2) if padding == 3 else (1, 1, 1, 1)
        by_hand = F.conv2d(F.pad(x, pads, mode=way), conv.weight, conv.bias, stride=stride, groups=2)
        assert torch.equal(conv(x), by_hand)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("padding", "expected"), [("same", (1, 2)), ("valid", (0, 0))])
def test_padding_in_words(padding, expected):
    conv = nn.Conv2d(1, 1, 4, padding=padding)
    x = torch.randn(1, 1, 9, 9)
    before = conv(x)
    assert stems.padding_of(conv) == (expected, expected)
    stems.set_convolution(conv, (1, 1), stems.padding_of(conv))
    assert torch.equal(conv(x), before)


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "dm_nfnet_f0", "vit_tiny_r_s16_p8_224"])
def test_a_convolution_that_pads_itself_takes_a_padding_of_its_own(name):
    """timm's classes without Same, given the same weights, are the reference: weights are standardised there too."""
    kinds = {
        "Conv2dSame": nn.Conv2d,
        "ScaledStdConv2dSame": timm.layers.ScaledStdConv2d,
        "StdConv2dSame": timm.layers.StdConv2d,
    }
    conv = next(iter(stems.first_convolutions(tiny(name)).values())).to_empty(device="cpu")
    for parameter in conv.parameters():
        nn.init.normal_(parameter)
    x, (_, kernel) = torch.randn(1, 3, 33, 33), conv.kernel_size
    other = kinds[type(conv).__name__](3, conv.out_channels, kernel, 1, padding=2, bias=conv.bias is not None)
    other.load_state_dict(conv.state_dict())
    if hasattr(conv, "eps"):
        other.eps = conv.eps
    parameters = list(map(id, conv.parameters()))
    stems.set_convolution(conv, (3, 3), None)
    assert conv(x).shape[2:] == (11, 11)
    stems.set_convolution(conv, (1, 1), ((2, 2), (2, 2)))
    assert torch.equal(conv(x), other(x))
    assert list(map(id, conv.parameters())) == parameters
