"""Models: what the settings say is what is built, computed in the right precision, kept, and rebuilt with no network."""

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from rsnakit import dryrun, runs, stems, surgery
from rsnakit.models import (
    ModelConfig,
    WeightsError,
    build_model,
    load_model,
    load_weights,
    read_weights,
    save_model,
    save_weights,
)
from rsnakit.taming import parse_pool
from rsnakit.targets import AUXILIARY

TINY = "test_efficientnet"  # 0.1 million parameters; its normalisation is ImageNet's


def build(backbone: str = TINY, weights: str | Path = "none", **settings) -> nn.Module:
    return build_model(ModelConfig(backbone=backbone, weights=str(weights), **settings)).eval()


def grey(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# --- settings -----------------------------------------------------------------------------------------------------------


def test_unknown_backbones_are_answered_with_near_ones():
    with pytest.raises(ValueError, match=r"'resnet81'; near it: .*resnet18"):
        build("resnet81")


@pytest.mark.parametrize(
    ("backbone", "settings", "message"),
    [
        ("dla34", {"drop_path": 0.1}, r"'dla34' cannot be built .* with drop_path=0\.1: .*; it is drop_path .*=0$"),
        ("dla34", {"drop_path": 0.1, "neck": "fpn"}, r"; it is drop_path that it cannot take: give drop_path=0$"),
        ("inception_next_atto", {}, "'inception_next_atto' cannot be built .*pooling.*; neck=fpn may take it"),
        ("inception_next_atto", {"drop_path": 0.1}, "'inception_next_atto' cannot be built .*; neck=fpn may take it"),
        ("csatv2", {}, r"'csatv2' cannot be built with one input channel.*in_chans=1 may not work[^;]*$"),  # M02
        ("csatv2", {"neck": "fpn"}, r"'csatv2' cannot be built with one input channel.*in_chans=1[^;]*$"),
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stem_stride": (1, 2, 3)}, r"stem_stride: got \(1, 2, 3\), expected one number, two"),
        ({"stem_padding": (1, 2, 3)}, r"stem_padding: got \(1, 2, 3\)"),
        ({"stem_stride": (0,)}, r"stem_stride: got \(0,\)"),
        ({"input_pad": (1, 2)}, r"input_pad: got \(1, 2\), expected four numbers \(left, right, top, bottom\)"),
        ({"pools": ("layer1",)}, r"pools: got 'layer1', expected a module's name and a kernel, such as stages.0:2"),
        ({"pools": ("layer1:0x2",)}, r"pools: got 'layer1:0x2'"),
        ({"pools": ("layer1:2:replaced",)}, r"pools: got 'layer1:2:replaced'"),
        ({"aux": ("birads", "density", "birads")}, r"aux: birads stands there more than once"),
        ({"aux": ("view",), "views": "mean"}, r"aux: 'view' is of single images, and views='mean'"),
        ({"aux": ("age",)}, r"aux: got \('age',\)"),
        ({"drop_weights": ("",)}, r"drop_weights: an empty text"),
        ({"pooling": "median"}, r"pooling: got 'median'"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(backbone=TINY, weights="none", **settings)


def test_pools_are_read_as_they_are_written():
    assert parse_pool("stages_0.downsample:4x1") == ("stages_0.downsample", (4, 1), False)
    assert parse_pool("maxpool:2:replace") == ("maxpool", (2, 2), True)


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


def test_auxiliary_heads_give_the_logits_of_their_targets():
    torch.manual_seed(0)
    model = build(TINY, aux=tuple(AUXILIARY))
    images = grey(3, 1, 64, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    shapes = {"cancer": (3,), "biopsy": (3,), "invasive": (3,), "birads": (3, 3), "density": (3, 4), "difficult": (3,)}
    assert {k: tuple(v.shape) for k, v in logits.items()} == {**shapes, "view": (3,)}
    assert all(v.dtype == torch.float32 for v in logits.values())
    with torch.no_grad():
        features = model.features(images)
        expected = features @ model.aux_heads["birads"].weight.T + model.aux_heads["birads"].bias
        torch.testing.assert_close(model(images)["birads"], expected)
        assert set(model.classify(features)) == set(logits)
    assert [k for k in model.state_dict() if k.startswith("head.")] == [
        "head.weight",
        "head.bias",
    ]  # as older files have
    # every head is trained, and of breasts too
    breasts = build(TINY, aux=("density", "biopsy"), views="mean")
    sum(v.sum() for v in breasts(grey(2, 3, 1, 64, 32)).values()).backward()
    assert all(p.grad is not None for p in breasts.parameters())


@pytest.mark.parametrize("shape", [(2, 3, 64, 32), (64, 32), (2, 4, 3, 64, 32), (1, 64, 32)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"expected \(B, 1, H, W\), or \(B, V, 1, H, W\)"):
        build(TINY)(torch.zeros(shape))


# --- half precision -----------------------------------------------------------------------------------------------------


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


# --- kept and rebuilt ---------------------------------------------------------------------------------------------------

TAMED = {
    "backbone": "test_convnext", "weights": "none", "pooling": "gem", "neck": "fpn_scse", "neck_channels": 16,
    "views": "attention", "aux": ("density", "biopsy"), "stem_stride": (4, 1), "stem_padding": (0, 2),
    "pools": ("stages.1.downsample:2x1",), "input_pad": (0, 0, 10, 10), "input_pad_mode": "reflect",
    "grad_checkpointing": True,
}  # fmt: skip
REBUILD = """
import socket, sys, torch
def refuse(*arguments, **options):
    raise OSError("no network here")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
from rsnakit.models import load_model
model = load_model(sys.argv[1])
assert not model.training
x, ids = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(model(x, view_id=ids), sys.argv[3])
"""


def noisy(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor).abs() * 0.01)
    return model


@pytest.fixture(scope="module")
def tamed(tmp_path_factory):
    """A tamed model that began from a file which is no longer there."""
    path = tmp_path_factory.mktemp("source") / "source.safetensors"
    torch.manual_seed(0)
    save_weights(build(TAMED["backbone"]), path)
    model = noisy(build_model(ModelConfig(**{**TAMED, "weights": str(path)}))).eval()
    path.unlink()
    return model


def test_a_tamed_model_is_rebuilt_in_another_process_without_network(tamed, tmp_path):
    # M01, M03
    x, ids = grey(2, 2, 1, 96, 40), torch.tensor([[0, 1], [1, 0]])
    with torch.no_grad():
        expected = tamed(x, view_id=ids)
    save_model(tamed, tmp_path / "run" / "fold0", prior=0.02)
    assert sorted(p.name for p in (tmp_path / "run" / "fold0").iterdir()) == ["best.safetensors", "model.json"]
    described = json.loads((tmp_path / "run" / "fold0" / "model.json").read_text())
    assert described["prior"] == 0.02 and described["versions"] == runs.versions()
    assert described["model"] == json.loads(json.dumps(dataclasses.asdict(tamed.config)))
    torch.save([x, ids], tmp_path / "x.pt")
    arguments = [tmp_path / "run" / "fold0", tmp_path / "x.pt", tmp_path / "y.pt"]
    subprocess.run([sys.executable, "-c", REBUILD, *map(str, arguments)], cwd=Path(__file__).parents[1], check=True)
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for name, logits in expected.items():
        assert torch.equal(found[name], logits), name


def test_taming_changes_no_name_and_no_weight(tmp_path):
    plain = {k: v for k, v in TAMED.items() if k in ("backbone", "weights", "neck", "neck_channels")}
    source = noisy(build_model(ModelConfig(**plain)))
    save_weights(source, tmp_path / "source.safetensors")
    tamed = build_model(ModelConfig(**{**TAMED, "weights": str(tmp_path / "source.safetensors")}))
    ours, theirs = tamed.backbone.state_dict(), source.backbone.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(v, theirs[k]) for k, v in ours.items())
    # and the settings did something: timm's finest of three maps is 96 x 40 over 8
    x = grey(1, 1, 96, 40)
    with torch.no_grad():
        fine = tamed.pyramid(tamed.backbone, x)[0].shape[2:]
        assert source.pyramid(source.backbone, x)[0].shape[2:] == (12, 5)
    # (96 + 20) / 4 = 29 rows, pooled to 14, halved to 7; 40 + 4 - 3 = 41 columns, halved to 20
    assert tuple(fine) == (7, 20)


@pytest.mark.parametrize("settings", [{"stem_stride": (1, 2, 3)}, {"pools": ("no.such:2",)}])
def test_what_the_backbone_cannot_do_is_said(settings):
    with pytest.raises(ValueError, match=r"stem_stride|no\.such"):
        build("test_convnext", **settings)


def test_wrapped_models_are_kept_as_plain_ones(tmp_path):
    # M03
    model = noisy(build(TINY, aux=("biopsy",)))
    wrappers = (torch.compile, nn.DataParallel, ModelEmaV3, torch.optim.swa_utils.AveragedModel)
    for number, wrapped in enumerate(wrap(model) for wrap in wrappers):
        save_model(wrapped, tmp_path / str(number))
        again = load_model(tmp_path / str(number))
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items())
        assert not any(
            "module." in k or "_orig_mod" in k for k in read_weights(tmp_path / str(number) / "best.safetensors")
        )


def test_what_is_kept_can_be_told_from_what_is_not(tmp_path):
    with pytest.raises(ValueError, match=r"Linear is no CancerNet, so it cannot be rebuilt"):
        save_model(nn.Linear(1, 1), tmp_path)
    with pytest.raises(ValueError, match=r"versions: written by save_model itself"):
        save_model(build(TINY), tmp_path, versions=1)
    with pytest.raises(ValueError, match=r"model: written by save_model itself"):
        save_model(build(TINY), tmp_path, model=3)
    with pytest.raises(WeightsError, match=r"no model.json and no best.safetensors here"):
        load_model(tmp_path)
    save_model(build(TINY), tmp_path)
    described = json.loads((tmp_path / "model.json").read_text())
    del described["model"]["neck"]
    (tmp_path / "model.json").write_text(json.dumps(described))
    with pytest.raises(runs.RunError, match=r"its ModelConfig lacks \['neck'\]"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no settings under the name 'model'"),
        ("[1]", "has no settings under the name 'model'"),
        ('{"model": 3}', "has no settings under the name 'model'"),
        ('{"model": {"backb', "cut short or damaged"),
        ("", "cut short or damaged"),
    ],
)
def test_a_model_json_of_something_else_is_named(tmp_path, text, message):
    save_model(build(TINY), tmp_path)
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(runs.RunError, match=rf"model\.json: {message}"):
        load_model(tmp_path)


def test_a_kept_setting_that_is_refused_names_its_folder(tmp_path):
    save_model(build(TINY), tmp_path)
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace(TINY, "gone_from_timm"))
    with pytest.raises(runs.RunError, match=rf"{tmp_path.name}: backbone: timm .* has no model 'gone_from_timm'"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "tame",
    [
        lambda model: surgery.set_stem(model.backbone, stride=1),
        lambda model: surgery.set_stem(model, stride=(4, 2)),
        lambda model: surgery.set_stem(model.backbone, padding=3),
        lambda model: surgery.insert_pool(model.backbone, "blocks.1", (2, 1)),
        lambda model: surgery.insert_pool(model, "backbone.blocks.1.0.bn2.act", (2, 2), replace=True),
        lambda model: surgery.pad_input(model.backbone, (1, 1, 0, 0)),
    ],
)
def test_what_is_tamed_by_hand_is_not_lost_without_a_word(tmp_path, tame):
    model = build(TINY)
    tame(model)
    with pytest.warns(UserWarning, match=r"were changed after build_model; load_model will rebuild it without that"):
        save_model(copy.deepcopy(model), tmp_path)


def test_what_the_settings_tamed_is_kept_without_a_warning(tamed, tmp_path, recwarn):
    for number, model in enumerate((tamed, copy.deepcopy(tamed), nn.DataParallel(tamed), ModelEmaV3(tamed))):
        save_model(model, tmp_path / str(number))
    nested = build(TINY, stem_stride=(1,))
    nested.backbone = torch.compile(nested.backbone)
    save_model(nested, tmp_path / "nested")
    again = load_model(tmp_path / "nested")
    save_model(again, tmp_path / "again")
    assert again.backbone.conv_stem.stride == (1, 1)
    assert [str(w.message) for w in recwarn if "build_model" in str(w.message)] == []


def test_drop_weights_without_weights_is_said(caplog, tmp_path):
    save_weights(build(TINY), tmp_path / "source.safetensors")
    build(TINY, drop_weights=("head.",))
    assert "drop_weights=('head.',) is of no effect: weights='none' loads nothing" in caplog.text
    caplog.clear()
    save_model(build(TINY, tmp_path / "source.safetensors", drop_weights=("head.",)), tmp_path)
    load_model(tmp_path)  # its own weights come, whatever training began from
    assert caplog.text == ""


# --- trained ------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, steps: int, ema: ModelEmaV3 | None = None, shift: float = 0.0) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    model.train()
    for step in range(steps):
        loss = model(grey(4, 1, 64, 32, seed=step) + shift)["cancer"].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ema is not None:
            ema.update(model)


def test_weights_trained_compiled_come_back_bit_for_bit(tmp_path):
    # M03: two steps compiled, kept, into a plain model and back, through an average and a wrapper
    settings = {"pooling": "attention", "pools": ("blocks.1:2x1",)}
    torch.manual_seed(0)
    model = build(TINY, **settings)
    compiled = torch.compile(model, backend="eager")
    average = ModelEmaV3(compiled, decay=0.5)
    train(compiled, 2, average)
    for number, source in enumerate((compiled, nn.DataParallel(compiled), average)):
        path = tmp_path / f"{number}.safetensors"
        save_weights(source, path)
        inner = average.module._orig_mod if source is average else model
        expected = inner.state_dict()
        assert sorted(read_weights(path)) == sorted(expected)
        for target in (build(TINY, **settings), torch.compile(build(TINY, **settings), backend="eager"),
                       ModelEmaV3(build(TINY, **settings))):  # fmt: skip
            load_weights(target, path)
            found = target.state_dict().values()
            assert all(torch.equal(a, b) for a, b in zip(found, expected.values(), strict=True))
    moved = [not torch.equal(a, b) for a, b in zip(average.module.parameters(), model.parameters(), strict=True)]
    assert any(moved)


def test_the_average_of_a_tamed_model_has_its_buffers_and_is_tamed():
    # T11
    torch.manual_seed(0)
    settings = {"backbone": TINY, "stem_stride": (1,), "pools": ("blocks.1:2x1",), "input_pad": (1, 1, 1, 1)}
    model = build_model(ModelConfig(weights="none", dropout=0.0, **settings))
    average = ModelEmaV3(model, decay=0.9)
    begun = average.module.backbone.bn1.running_mean.clone()
    norm, follows = model.backbone.bn1, begun.clone()
    for step in range(5):
        train(model, 1, average, shift=5.0)
        follows = 0.9 * follows + 0.1 * norm.running_mean
        assert average.module.backbone.bn1.num_batches_tracked == step + 1
    torch.testing.assert_close(average.module.backbone.bn1.running_mean, follows)
    assert not torch.allclose(follows, begun)
    # with the model's own weights, the copy computes what the model does: stride, pool and pad came along, each its own
    average.set(model)
    x = grey(2, 1, 64, 32)
    with torch.no_grad():
        assert torch.equal(average.module.eval()(x)["cancer"], model.eval()(x)["cancer"])
        sizes = [build(**other).backbone(x).shape[2:] for other in (settings, {"backbone": TINY})]
    assert sizes[0] != sizes[1]


def test_checkpointing_changes_no_result():
    # M07; stochastic depth on top
    torch.manual_seed(0)
    settings = {"backbone": TINY, "weights": "none", "drop_path": 0.2, "stem_stride": (1,)}
    plain, saving = (build_model(ModelConfig(grad_checkpointing=on, **settings)) for on in (False, True))
    saving.load_state_dict(plain.state_dict())
    for model in (plain, saving):
        model.train()
        calls = []
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(1)
        model(grey(2, 1, 64, 64))["cancer"].sum().backward()
        norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        assert len(calls) > norms if model is saving else len(calls) == norms  # computed again, or not
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)
    for a, b in zip(plain.buffers(), saving.buffers(), strict=True):
        torch.testing.assert_close(b, a)


def test_compiled_in_another_layout_and_copied_it_is_the_same_model():
    torch.manual_seed(0)
    model = build(TINY, pooling="attention", aux=("density",), stem_stride=(1, 2))
    x = grey(2, 1, 64, 32)
    with torch.no_grad():
        full = model(x)["density"]
        for other in (torch.compile(model, backend="eager"), copy.deepcopy(model)):
            torch.testing.assert_close(other(x)["density"], full)
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        torch.testing.assert_close(last(x)["density"], full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooling", ["avg", "max", "gem", "attention"])
def test_it_runs_dry(pooling):
    model = build(pooling=pooling, views="attention", neck="fpn_scse", aux=("birads",))
    kinds = torch.zeros(3, 2, dtype=torch.long)
    found = dryrun.run(model, torch.empty(3, 2, 1, 64, 32), view_id=kinds)
    assert {name: tuple(logits.shape) for name, logits in found.items()} == {"cancer": (3,), "birads": (3, 3)}
    assert list(stems.first_convolutions(model)) == ["backbone.conv_stem"]
