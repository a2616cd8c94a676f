"""Intermediate results: right whatever the model does to them later, and nothing left behind."""

import collections
import copy
import gc
import warnings
import weakref

import pytest
import timm
import torch
from timm.models import checkpoint_seq
from torch import nn

from rsnakit import dryrun
from rsnakit.patching import original, replace_method
from rsnakit.taps import capture


@pytest.fixture
def resnet():
    torch.manual_seed(0)
    return timm.create_model("test_resnet").eval()


@pytest.fixture
def vit():
    torch.manual_seed(0)
    return timm.create_model("test_vit").eval()


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(2, 3, 64, 64)


def traces(model):
    """What a block must leave as it was."""
    return (
        list(model.state_dict()),
        [(m.training, getattr(m, "fused_attn", None), len(m._forward_hooks), sorted(vars(m))) for m in model.modules()],
    )


def test_results_are_those_of_the_modules_and_methods(resnet, images):
    before = traces(resnet)
    with torch.no_grad():
        whole = resnet(images)
        with capture(resnet, ["", "layer1", "forward_features", "layer2.0.forward", "layer4.0.conv1"]) as seen:
            assert torch.equal(resnet(images), whole)
        stem = resnet.maxpool(resnet.act1(resnet.bn1(resnet.conv1(images))))
        layer1 = resnet.layer1(stem)
        features = resnet.forward_features(images)
    assert torch.equal(seen[""], whole)
    assert torch.equal(seen["layer1"], layer1)
    assert torch.equal(seen["forward_features"], features)
    assert torch.equal(seen["layer2.0.forward"], resnet.layer2[0](layer1))
    assert seen["layer4.0.conv1"].shape == dryrun.shapes(resnet, ["layer4.0.conv1"], images)["layer4.0.conv1"][1]
    assert traces(resnet) == before


@pytest.mark.parametrize("detach", [True, False])
def test_what_the_model_does_in_place_afterwards_is_not_in_the_result(resnet, images, detach):
    assert resnet.act1.inplace
    with torch.no_grad():
        expected = resnet.bn1(resnet.conv1(images))
    assert expected.min() < 0
    whole = resnet(images).detach()
    with capture(resnet, ["conv1", "bn1", "act1", "bn1.forward"], detach=detach) as seen:
        assert torch.equal(resnet(images).detach(), whole)
    assert torch.equal(seen["bn1"].detach(), expected) and torch.equal(seen["bn1.forward"].detach(), expected)
    assert torch.equal(seen["act1"].detach(), expected.relu())


class Alias(nn.Module):
    """Passes its input on, which is then changed under its other name."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        y = x * self.scale
        z = self.same(y)
        y.mul_(10)
        return (z * 1).sum()


@pytest.mark.parametrize("detach", [True, False])
def test_a_result_that_is_also_known_by_another_name(detach):
    model = Alias()
    with capture(model, "same", detach=detach) as seen:
        model(torch.ones(3))
    assert torch.equal(seen["same"].detach(), torch.full((3,), 2.0))


def test_with_the_graph_gradients_of_a_result_are_the_true_ones(resnet, images):
    """Grad-CAM's gradient; the reference goes on by hand from a leaf."""
    with capture(resnet, "layer3", detach=False) as seen:
        logit = resnet(images)[:, 0].sum()
    (gradient,) = torch.autograd.grad(logit, seen["layer3"], retain_graph=True)
    leaf = seen["layer3"].detach().requires_grad_()
    resnet.forward_head(resnet.layer4(leaf))[:, 0].sum().backward()
    assert torch.allclose(gradient, leaf.grad, atol=1e-6)
    logit.backward()  # and the weights' gradients go through it
    got = resnet.conv1[0].weight.grad.clone()
    resnet.zero_grad()
    resnet(images)[:, 0].sum().backward()
    assert torch.equal(got, resnet.conv1[0].weight.grad)


def test_detached_results_hold_no_graph_and_leave_training_as_it_is(resnet, images):
    resnet.train()
    twin = copy.deepcopy(resnet)
    with capture(resnet, ["layer1", "bn1"]) as seen:
        resnet(images).sum().backward()
    twin(images).sum().backward()
    assert not seen["layer1"].requires_grad and seen["layer1"].grad_fn is None
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(resnet.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(resnet.buffers(), twin.buffers(), strict=True))


Pair = collections.namedtuple("Pair", "left right")


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        out = self.part(x)
        out["list"][0].zero_()
        return out


class Part(nn.Module):
    def forward(self, x):
        return {"list": [x + 1, None, 3], "pair": Pair(x + 2, "text"), "tuple": (x + 3,)}


def test_tuples_lists_and_dicts_are_taken_likewise():
    model = Nested()
    with capture(model, "part", detach=False) as seen:
        model(torch.zeros(2))
    part = seen["part"]
    assert torch.equal(part["list"][0], torch.ones(2)) and part["list"][1:] == [None, 3]
    assert isinstance(part["pair"], Pair) and part["pair"].right == "text"
    assert torch.equal(part["pair"].left, torch.full((2,), 2.0))
    assert torch.equal(part["tuple"][0], torch.full((2,), 3.0))


def test_what_is_called_several_times_gives_a_list():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1] = model[0]  # one module under two names
    with capture(model, ["0", "1"]) as seen:
        result = model(torch.ones(1, 1))
        assert [len(seen["0"]), len(seen["1"])] == [2, 2]
        seen.clear()
        model(torch.ones(1, 1))
    assert torch.equal(seen["1"][1], result) and torch.equal(seen["0"][0], model[0](torch.ones(1, 1)))
    with capture(model, "") as seen:
        model(torch.ones(1, 1))
        assert torch.equal(seen[""], result)
        for _ in range(2):
            model(torch.ones(1, 1))
    assert len(seen[""]) == 3


def test_attention_maps_are_the_softmax_of_queries_and_keys(vit):
    images = torch.randn(2, 3, 160, 160)
    attention = vit.blocks[1].attn
    assert attention.fused_attn
    before = traces(vit)
    with torch.no_grad():
        whole = vit(images)
        with capture(vit, ["blocks.1.attn.qkv", "blocks.1.attn.attn_drop", "blocks.1.attn"]) as seen:
            result = vit(images)
            assert not attention.fused_attn and vit.blocks[0].attn.fused_attn
    assert torch.allclose(result, whole, atol=1e-5)
    qkv, maps = seen["blocks.1.attn.qkv"], seen["blocks.1.attn.attn_drop"]
    b, n, heads, width = 2, qkv.shape[1], attention.num_heads, attention.head_dim
    assert maps.shape == (b, heads, n, n)
    assert torch.allclose(maps.sum(-1), torch.ones(b, heads, n), atol=1e-5)
    queries, keys, values = qkv.reshape(b, n, 3, heads, width).permute(2, 0, 3, 1, 4)
    expected = torch.einsum("bhqd,bhkd->bhqk", queries, keys).div(width**0.5).exp()
    expected = expected / expected.sum(-1, keepdim=True)
    assert torch.allclose(maps, expected, atol=1e-6)
    mixed = torch.einsum("bhqk,bhkd->bqhd", maps, values).reshape(b, n, -1)
    assert torch.allclose(seen["blocks.1.attn"], attention.proj(mixed), atol=1e-5)
    assert traces(vit) == before


def test_gates_of_squeeze_and_excitation(images):
    """Hu et al., 2018: a map times the sigmoid of two layers on its mean."""
    model = timm.create_model("test_efficientnet").eval()
    se = model.blocks[3][0].se
    with torch.no_grad():
        with capture(model, [f"blocks.3.0.{name}" for name in ("bn2", "se.gate", "se.conv_reduce", "se")]) as seen:
            model(images)
        squeezed, gate = seen["blocks.3.0.se.conv_reduce"], seen["blocks.3.0.se.gate"]
        x = seen["blocks.3.0.bn2"]
        mean = x.mean((2, 3))
        reduced = mean @ se.conv_reduce.weight[:, :, 0, 0].T + se.conv_reduce.bias
        assert torch.allclose(squeezed[:, :, 0, 0], reduced, atol=1e-5)
        excited = nn.functional.silu(reduced) @ se.conv_expand.weight[:, :, 0, 0].T + se.conv_expand.bias
    assert torch.allclose(gate[:, :, 0, 0], 1 / (1 + (-excited).exp()), atol=1e-5)
    assert torch.equal(seen["blocks.3.0.se"], x * gate)


def test_a_module_in_place_of_a_name(resnet):
    with pytest.raises(ValueError, match=r"names are text.*got Sequential"), capture(resnet, resnet.layer1):
        pass


@pytest.mark.parametrize(
    ("names", "kind"), [(None, "NoneType"), (3, "int"), (["layer1", None], "NoneType"), ([["layer1"]], "list")]
)
def test_what_is_no_name_is_told_what_names_are(resnet, names, kind):
    with pytest.raises(ValueError, match=rf"names are text.*'layer1'.*got {kind}"), capture(resnet, names):
        pass


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer5", "near it: layer4, layer3"),
        ("layer1.0.conv9", "near it: layer1.0.conv2, layer1.0.conv1"),
        ("layer1.0.forwards", "near it: layer1.0.forward"),
        ("forward_feature", "near it: forward_features"),
        ("layer1.0.conv1.weight", "has weight, but as a tensor, not a method"),
        ("layer1.0.__call__", "replace forward"),
        ("nothing.like.it", "near it: conv1, bn1, act1"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(resnet, name, words):
    before = traces(resnet)
    with pytest.raises(ValueError, match="ResNet has no module or method") as error, capture(resnet, ["layer1", name]):
        pass
    assert repr(name) in str(error.value) and words in str(error.value)
    assert traces(resnet) == before


def test_names_of_features_only_models(images):
    model = timm.create_model("test_convnext", features_only=True).eval()
    with pytest.raises(ValueError, match=r"near it: stages_0\.downsample"), capture(model, "stages.0.downsample"):
        pass
    with torch.no_grad(), capture(model, ["stages_0", ""]) as seen:
        maps = model(images)
    assert torch.equal(seen["stages_0"], maps[0])
    assert [m.shape for m in seen[""]] == [m.shape for m in maps]  # one call that gave a list


def test_a_name_that_was_never_called_is_an_error(resnet, images):
    unused = capture(resnet, "layer1")
    with pytest.raises(ValueError, match=r"never called in the block: 'layer1'. Did the ResNet run"), unused:
        pass
    with pytest.raises(ValueError, match=r"'layer4'"), capture(resnet, ["layer1", "layer4"]) as seen:
        resnet.layer1(resnet.maxpool(resnet.conv1(images)))
    assert list(seen) == ["layer1"]
    holder = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(ValueError, match="list only holds modules"), capture(holder, "list"):
        pass
    with pytest.raises(RuntimeError, match="stop"), capture(resnet, "layer1"):  # no word of it where there is worse
        raise RuntimeError("stop")
    attention = nn.MultiheadAttention(4, 1)
    with pytest.raises(ValueError, match=r"out_proj.* only by its weights"), capture(attention, ["", "out_proj"]):
        attention(*[torch.ones(1, 1, 4)] * 3)


def test_memory_is_given_back_on_exceptions_too(vit):
    before = traces(vit)
    with (
        pytest.raises(RuntimeError, match="stop"),
        capture(vit, ["blocks.0.attn.attn_drop", "forward_features"]) as seen,
    ):
        vit(torch.randn(1, 3, 160, 160))
        raise RuntimeError("stop")
    assert traces(vit) == before
    results = [weakref.ref(value) for value in seen.values()]
    assert all(ref() is not None for ref in results)
    del seen
    gc.collect()
    assert all(ref() is None for ref in results)


def test_a_failing_forward_leaves_nothing_behind(resnet):
    before = traces(resnet)
    with pytest.raises(RuntimeError), capture(resnet, ["conv1", "layer4.forward"]):
        resnet(torch.randn(1, 7, 8, 8))
    assert traces(resnet) == before


def test_results_on_another_device(resnet):
    with capture(resnet, "layer1", device="meta", detach=False) as seen:
        result = resnet(torch.randn(1, 3, 32, 32))
    assert seen["layer1"].device.type == "meta" and result.device.type == "cpu"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("detach", [True, False])
def test_checkpointing_does_not_record_what_it_computes_again(reentrant, detach):
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)) for _ in range(3)])
    x = torch.randn(4, 3, requires_grad=True)
    blocks(x).square().sum().backward()
    expected = [p.grad.clone() for p in blocks.parameters()]
    blocks.zero_grad()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            return checkpoint_seq(self.blocks, x, use_reentrant=reentrant)

    model = Checkpointed()
    with capture(model, ["blocks.1", "blocks.2.0.forward"], detach=detach) as seen:
        model(x).square().sum().backward()
    assert torch.equal(seen["blocks.1"].detach(), blocks[:2](x).detach())
    assert torch.equal(seen["blocks.2.0.forward"].detach(), blocks[2][0](blocks[:2](x)).detach())
    assert all(torch.allclose(p.grad, g) for p, g in zip(blocks.parameters(), expected, strict=True))


def test_attention_maps_of_a_checkpointed_model(vit):
    vit.train()
    vit.set_grad_checkpointing()
    with capture(vit, "blocks.0.attn.attn_drop") as seen:
        vit(torch.randn(1, 3, 160, 160)).sum().backward()
    assert torch.allclose(seen["blocks.0.attn.attn_drop"].sum(-1), torch.ones(()), atol=1e-5)


def test_under_autocast_results_have_the_precision_of_the_model(resnet, images):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), capture(resnet, "layer1.0.conv1") as seen:
        resnet(images)
    assert seen["layer1.0.conv1"].dtype == torch.bfloat16


def test_deep_copies_of_and_within_the_block(resnet, images):
    twin = copy.deepcopy(resnet)
    with torch.no_grad(), capture(twin, ["layer1", "forward_features"]) as seen:
        resnet(images)
        assert not seen
        twin(images)
        inner = copy.deepcopy(twin)
        inner(images)
    assert all(isinstance(value, torch.Tensor) for value in seen.values())  # called once, not by the copy
    inner(images)
    assert all(isinstance(value, torch.Tensor) for value in seen.values())
    assert torch.equal(seen["layer1"], twin.layer1(twin.maxpool(twin.act1(twin.bn1(twin.conv1(images))))))
    results = [weakref.ref(value) for value in seen.values()]
    del seen
    gc.collect()
    assert all(ref() is None for ref in results)  # the inner copy, which has the hooks still, does not hold them


def test_a_patched_method_can_be_captured_and_stays_patched(resnet, images):
    replace_method(resnet, "forward_features", lambda self, x: original(self, "forward_features")(x) + 1)
    with (
        torch.no_grad(),
        capture(resnet, ["forward_features", "layer4"]) as seen,
        capture(resnet, "forward_features") as again,
    ):
        resnet(images)
    assert torch.equal(seen["forward_features"], seen["layer4"] + 1)
    assert torch.equal(again["forward_features"], seen["forward_features"])
    with torch.no_grad():
        assert torch.equal(resnet.forward_features(images), seen["forward_features"])


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.middle(x))

    def middle(self, x):
        return self.first(x).relu()


@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "part", "function"])
def test_compiled_models_run_uncompiled_in_the_block_and_compiled_after_it(how):
    torch.compiler.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    model, x = Small(), torch.randn(3, 2)
    called = model
    if how == "torch.compile":
        called = torch.compile(model, backend=backend)
    elif how == "model.compile":
        model.compile(backend=backend)
    elif how == "part":
        model.first = torch.compile(model.first, backend=backend)
    else:
        called = torch.compile(lambda x: model(x), backend=backend)
    expected = called(x)
    compiled = len(graphs)
    assert compiled > 0
    tapped = called if isinstance(called, nn.Module) else model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture(tapped, ["first", "middle"]) as seen:
            assert torch.allclose(called(x), expected)
    assert torch.allclose(seen["middle"], seen["first"].relu())
    assert torch.allclose(seen["first"], x @ model.first.weight.T + model.first.bias)
    torch._dynamo.utils.counters.clear()
    assert torch.allclose(called(x), expected) and len(graphs) == compiled  # its code is still good
    torch.compiler.reset()
