"""rsnakit.anatomy: the table is that of a real run, the parts add up, and the model is left as it was."""

import copy
import random
import re

import numpy as np
import pytest
import timm
import torch
import torchinfo
from timm import layers as timm_layers
from timm.layers.grn import GlobalResponseNorm
from timm.models import metaformer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rsnakit import anatomy, patching, taps


class Zoo(nn.Module):
    """A part of each kind, two layers that share a weight, one layer called twice and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=(4, 1), padding=3)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.shuffle = nn.PixelShuffle(2)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.GroupNorm(2, 8)])
        self.act = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.linear.weight
        self.rest = nn.Sequential(nn.Dropout(0.5), nn.Identity())
        self.kinds = nn.Embedding(2, 8)
        self.gamma = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pointwise(self.grouped(self.depthwise(self.stem(x))))
        for norm in self.norms:
            x = self.act(norm(x))
        x = torch.relu(x + self.shuffle(self.up(x)).mean((1, 2, 3), keepdim=True))
        tokens = self.pool(x).flatten(2).mT
        tokens = self.attention(tokens, tokens, tokens)[0] * self.gamma + self.kinds.weight[0]
        return self.rest(self.tied(self.linear(tokens))).softmax(-1) @ torch.cat([tokens.mT, tokens.mT], -1)


def names_in(text: str) -> list[str]:
    """The names in brackets in the first column."""
    return re.findall(r"─\w+ \(([^)]+)\)", text)


def state_of(model: nn.Module) -> tuple:
    return (
        [m.training for m in model.modules()],
        [(n, p.requires_grad, p.grad, p.device.type, p.dtype) for n, p in model.named_parameters()],
        sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        sorted(key for m in model.modules() for key in getattr(m, "attention_bias_cache", ())),
    )


# The table


@pytest.mark.parametrize("name", ["test_efficientnet", "test_vit"])
def test_the_table_is_that_of_a_real_run(name):
    model = timm.create_model(name)
    size = (2, 3, 160, 160)
    columns = [column.value for column in torchinfo.ColumnSettings]
    real = torchinfo.summary(copy.deepcopy(model), size, depth=4, col_names=columns, verbose=0, row_settings=["depth"])
    found = anatomy.summarize(model, size, depth=4, col_names=columns, col_width=25, row_settings=["depth"])
    assert str(found.table).split("Total mult-adds")[0] == str(real).split("Total mult-adds")[0]


def test_the_total_of_multiply_adds_has_tokens_and_attention():
    """test_vit: 6 blocks of width 64 and 192 in the MLP, on 100 patches of 16 x 16 pixels and a class token."""
    tokens, width = 101, 64
    block = tokens * width * (3 * width + width + 2 * 192) + 2 * tokens * tokens * width
    expected = 6 * block + 100 * 3 * 16 * 16 * width + width * 1000
    for batch in (1, 2):
        found = anatomy.summarize(timm.create_model("test_vit"), (batch, 3, 160, 160))
        assert found.table.total_mult_adds == batch * expected
        assert f"Total mult-adds (M): {batch * expected / 1e6:.2f}" in str(found)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "levit_128s"])
def test_names_are_whole_and_capture_takes_them(name):
    model = timm.create_model(name).eval()
    size = model.pretrained_cfg["input_size"]
    summary = anatomy.summarize(model, size, depth=9)
    shown, known = names_in(str(summary.table)), dict(model.named_modules())
    assert len(shown) > 20 and set(shown) <= set(known)
    assert set(summary.parts["example"]) - {"", "(the model)"} <= set(known)
    wanted = shown[:: len(shown) // 5]
    with torch.no_grad(), taps.capture(model, wanted) as seen:
        model(torch.rand(1, *size))
    assert set(seen) == set(wanted)


def test_depth_columns_and_width():
    model = timm.create_model("test_efficientnet")
    plain = str(anatomy.summarize(model, (3, 64, 64)))
    assert max(map(len, plain.splitlines())) <= 130
    for title in ("Input Shape", "Output Shape", "Param #", "Trainable", "Total mult-adds (M)"):
        assert title in plain
    assert {n.count(".") for n in names_in(plain)} == {0, 1, 2}
    narrow = str(anatomy.summarize(model, (3, 64, 64), depth=1))  # as wide as the names that it shows
    assert {n.count(".") for n in names_in(narrow)} == {0}
    assert len(narrow.splitlines()[0]) == 40 + 4 * 18
    other = str(anatomy.summarize(model, (3, 64, 64), 1, ["kernel_size"], 30, ["depth", "ascii_only"]).table)
    assert "+ Conv2d: 1-1" in other and "[3, 3]" in other and "├" not in other and "Output Shape" not in other
    with pytest.raises(ValueError, match=r"no colour; there are kernel_size, input_size"):
        anatomy.summarize(model, (3, 64, 64), col_names=["colour"])
    with pytest.raises(ValueError, match=r"no names; there are depth, var_names"):
        anatomy.summarize(model, (3, 64, 64), row_settings=["names"])
    for wrong in (-1, "3", None, 1.5):
        with pytest.raises(ValueError, match=f"depth is {wrong!r}; expected a whole number from 0"):
            anatomy.summarize(model, (3, 64, 64), depth=wrong)
    with pytest.raises(ValueError, match="col_width is 0; expected a whole number from 1"):
        anatomy.summarize(model, (3, 64, 64), col_width=0)


# The parts


def test_parts_of_a_zoo():
    model = Zoo()
    parts = anatomy.summarize(model, (3, 64, 32)).parts
    found = {(row.part, row.kind): (row.count, row.parameters, row.calls) for row in parts.itertuples()}
    assert found == {
        ("convolution", "7x7 stride 4x1"): (1, 3 * 8 * 49 + 8, 1),
        ("convolution", "3x3 2 groups"): (1, 8 * 4 * 9 + 8, 1),
        ("convolution", "3x3 dilation 2x2 depthwise"): (1, 8 * 9 + 8, 1),
        ("convolution", "1x1 pointwise"): (1, 8 * 8 + 8, 1),
        ("linear", "Linear"): (3, 8 * 8 + 8 + 8 * 3 + 3, 2),  # the tied weight once; one is never called
        ("linear", "NonDynamicallyQuantizableLinear"): (1, 8 * 8 + 8, 0),  # attention reads its weight
        ("norm", "BatchNorm2d"): (1, 16, 1),
        ("norm", "GroupNorm"): (1, 16, 1),
        ("activation", "ReLU"): (1, 0, 2),
        ("attention", "MultiheadAttention"): (1, 24 * 8 + 24, 1),
        ("pooling", "AdaptiveAvgPool2d"): (1, 0, 1),
        ("resampling", "2x2 stride 2x2 transposed"): (1, 8 * 4 * 4 + 4, 1),
        ("resampling", "PixelShuffle"): (1, 0, 1),
        ("dropout", "Dropout"): (1, 0, 1),
        ("embedding", "Embedding"): (1, 16, 0),
        ("identity", "Identity"): (1, 0, 1),
        ("other", "Zoo: gamma"): (1, 8, 1),
        **{("function", name): (1, 0, 1) for name in ("relu", "mean", "softmax", "matmul", "cat")},
        ("function", "multi_head_attention_forward"): (1, 0, 1),
    }
    assert parts["parameters"].sum() == sum(p.numel() for p in model.parameters())
    assert parts["share_%"].sum() == pytest.approx(100, abs=0.5)
    assert list(parts["part"].drop_duplicates())[:4] == ["convolution", "linear", "norm", "activation"]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "test_byobnet",
            "test_convnext2",
            "test_efficientnet_gn",
            "test_efficientnet_ln",
            "test_mambaout",
            "test_nfnet",
        ),
        *("test_resnet", "test_vit3", "xcit_nano_12_p8_224"),
    ],
)
def test_parts_add_up_over_families(name):
    model = timm.create_model(name)
    parts = anatomy.summarize(model, model.pretrained_cfg["input_size"]).parts
    assert parts["parameters"].sum() == sum(p.numel() for p in model.parameters())
    modules = list(model.modules())
    for part, kind in (("convolution", nn.Conv2d), ("linear", nn.Linear), ("dropout", nn.Dropout)):
        expected = sum(isinstance(m, kind) for m in modules)
        assert parts.loc[(parts["part"] == part) & ~parts["kind"].str.contains("DropPath"), "count"].sum() == expected
    assert parts.loc[parts["part"] == "norm", "count"].sum() == sum(
        "Norm" in type(m).__name__ and bool(m._parameters) for m in modules
    )


def test_parts_of_timms_own():
    layers = {
        "gate": [timm_layers.SEModule(8), timm_layers.EcaModule(8), timm_layers.EffectiveSEModule(8)],
        "norm": [
            timm_layers.BatchNormAct2d(8),
            timm_layers.LayerNorm2d(8),
            GlobalResponseNorm(8, channels_last=False),
        ],
        "activation": [metaformer.StarReLU(), timm_layers.GELUTanh()],
        "pooling": [timm_layers.BlurPool2d(8), timm_layers.AvgPool2dSame(2, 2)],
        "dropout": [timm_layers.DropPath(0.1)],
        "other": [timm_layers.LayerScale2d(8)],
    }
    model = nn.Sequential(*(layer for group in layers.values() for layer in group))
    parts = anatomy.summarize(model, (8, 32, 32)).parts
    for part, group in layers.items():
        kinds = set(parts.loc[parts["part"] == part, "kind"].str.split(":").str[0])
        assert {type(layer).__name__ for layer in group} <= kinds, part
    assert parts["parameters"].sum() == sum(p.numel() for p in model.parameters())
    for attention in ("levit_128s", "test_vit"):
        model = timm.create_model(attention)
        parts = anatomy.summarize(model, model.pretrained_cfg["input_size"]).parts
        expected = [
            sum(type(m).__name__ == kind for m in model.modules()) for kind in ("Attention", "AttentionDownsample")
        ]
        assert parts.loc[parts["part"] == "attention", "count"].tolist() == [n for n in expected if n]


# No trace


@pytest.mark.parametrize(
    ("name", "failing"), [("test_efficientnet", False), ("test_efficientnet", True), ("levit_128s", False)]
)
def test_it_leaves_no_trace(name, failing):
    model = timm.create_model(name, drop_rate=0.5).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    next(model.parameters()).requires_grad_(False)
    values, before = copy.deepcopy(model.state_dict()), state_of(model)
    if failing:
        with pytest.raises(ValueError):
            anatomy.summarize(model, (4, 224, 224))
    else:
        summary = anatomy.summarize(model, (3, 224, 224))
        assert "Partial" in str(summary.table)
    assert state_of(model) == before
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    model(torch.rand(2, 3, 224, 224))


def test_the_copy_that_runs_has_no_values():
    model = Zoo().half()
    with anatomy.fake_model(model, "cuda") as fake:
        tensors = [*fake.parameters(), *fake.buffers()]
        assert all(isinstance(t, FakeTensor) and t.device.type == "cuda" for t in tensors)
        assert [(t.shape, t.dtype) for t in tensors] == [
            (t.shape, t.dtype) for t in (*model.parameters(), *model.buffers())
        ]
        assert fake.tied.weight is fake.linear.weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_types(dtype):
    model = timm.create_model("test_resnet").to(dtype)
    anatomy.summarize(model, (3, 64, 64))
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_model_on_meta_too():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert "[1, 4, 6, 6]" in str(anatomy.summarize(model, (3, 8, 8)))


def test_compiled_and_patched_models():
    plain = timm.create_model("test_resnet")
    expected = str(anatomy.summarize(plain, (3, 64, 64)))
    compiled = torch.compile(plain, backend="eager")
    assert str(anatomy.summarize(compiled, (3, 64, 64))) == expected
    inside = copy.deepcopy(plain)
    inside.layer1 = torch.compile(inside.layer1, backend="eager")
    shown = names_in(str(anatomy.summarize(inside, (3, 64, 64), depth=9).table))
    assert "layer1.0.conv1" in shown and "_orig_mod" not in " ".join(shown)
    calls = []
    patching.replace_method(plain, "forward_head", lambda self, x: calls.append(self) or x.mean((2, 3)))
    assert "fc" not in names_in(str(anatomy.summarize(plain, (3, 64, 64))))
    assert calls and calls[0] is not plain  # the copy called itself


# Inputs


def test_forms_of_input():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(10, 4)

        def forward(self, image: torch.Tensor, row: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": self.conv(image).mean((2, 3)) + self.fc(row)}

    class Breasts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.kinds = nn.Conv2d(1, 4, 3), nn.Embedding(2, 4)

        def forward(self, x: torch.Tensor, view_mask=None, view_id=None) -> dict[str, torch.Tensor]:
            features = self.conv(x.flatten(0, 1)).mean((2, 3)).unflatten(0, x.shape[:2])
            return {"cancer": (features + self.kinds(view_id.to(x.device))).mean((1, 2))}

    assert "[2, 4, 6, 6]" in str(anatomy.summarize(Two(), [(2, 1, 8, 8), (2, 10)]))
    assert "[6, 4, 6, 6]" in str(anatomy.summarize(Breasts(), (2, 3, 1, 8, 8)))
    conv = nn.Conv2d(3, 4, 3)
    texts = {
        str(anatomy.summarize(conv, size)) for size in ((3, 8, 8), [3, 8, 8], (1, 3, 8, 8), torch.Size([1, 3, 8, 8]))
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 160, 160), r"VisionTransformer \(test_vit\) fails on .*to have 3 channels.*made for \(3, 160, 160\)"),
        ((3, 100, 100), r"fails on an input of \(3, 100, 100\). AssertionError.*100.*timm calls fixed"),
        ((3, 0, 160), "whole numbers"),
        ((3, 1.5, 160), "whole numbers"),
        (160, "160"),
        ("image", "whole numbers"),
    ],
)
def test_wrong_inputs_are_named(size, message):
    with pytest.raises(ValueError, match=message):
        anatomy.summarize(timm.create_model("test_vit"), size)


def test_a_model_that_asks_for_values_is_told_so():
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match=r"Asks fails .* asks for values, and here it runs on shapes alone"):
        anatomy.summarize(Asks(), (3, 8, 8))
