"""Checkpointed models against the plain ones they were copied from: same numbers, fewer bytes."""

import copy
import warnings

import pytest
import timm
import torch
from kept import bytes_kept
from timm.layers import EvoNorm2dB0
from timm.models import FeatureListNet
from timm.models.vgg import VGG
from timm.utils import ModelEmaV3
from torch import nn

from rsnakit import checkpointing, patching, surgery
from rsnakit.models import ModelConfig, build_model

# Small models by family, the image size, and options that make them smaller still.
FAMILIES = {
    "test_byobnet": (32, {}),
    "test_convnext": (32, {}),
    "test_efficientnet": (32, {"drop_path_rate": 0.5, "drop_rate": 0.5}),
    "test_efficientnet_evos": (32, {}),
    "test_mambaout": (32, {}),
    "test_nfnet": (32, {}),
    "resnet10t": (32, {"drop_path_rate": 0.5}),
    "test_vit": (32, {"img_size": 32, "drop_path_rate": 0.5, "attn_drop_rate": 0.2, "proj_drop_rate": 0.2}),
    "test_vit_relpos": (32, {"img_size": 32}),
    "test_coatnet": (64, {"img_size": 64}),
    "cait_xxs24_224": (32, {"img_size": 32, "embed_dim": 16, "depth": 3, "num_heads": 2}),
    "coat_tiny": (32, {"img_size": 32, "embed_dims": (16,) * 4, "parallel_depth": 3}),  # keyword arguments
    "crossvit_tiny_240": (
        120,
        {"img_size": 120, "embed_dim": (16, 32), "depth": ((1, 2, 1),) * 2, "num_heads": (2, 2)},
    ),
    "densenet121": (32, {"growth_rate": 4, "block_config": (2, 2, 4, 2)}),  # a list, appended to after the call
    "dla46x_c": (32, {}),
    "edgenext_xx_small": (64, {"dims": (16, 24, 32, 48), "depths": (2, 2, 3, 2)}),
    "efficientvit_b0": (64, {}),
    "ghostnet_050": (32, {}),
    "inception_v3": (75, {}),
    "mobilenetv3_small_050": (32, {}),
    "pit_ti_224": (
        64,
        {"img_size": 64, "base_dims": (8, 8, 8), "depth": (1, 2, 1), "heads": (1, 2, 2)},
    ),  # tuples go in
    "pvt_v2_b0": (32, {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 1, 2, 2)}),
    "regnetx_002": (32, {}),
    "repghostnet_050": (32, {}),
    "swin_tiny_patch4_window7_224": (
        56,
        {"img_size": 56, "embed_dim": 12, "depths": (2, 2, 3, 2), "num_heads": (1, 2, 3, 4), "drop_path_rate": 0.3},
    ),
    "xcit_nano_12_p8_224": (32, {"img_size": 32, "embed_dim": 16, "depth": 4, "num_heads": 2}),
    "test_resnet": (32, {"features_only": True}),  # M05, as are the next two
    "test_convnext2": (32, {"features_only": True}),
    "test_efficientnet_gn": (32, {"features_only": True}),
}


def make(name: str, **more) -> nn.Module:
    _, options = FAMILIES[name]
    torch.manual_seed(0)
    if not options.get("features_only"):
        options = {"num_classes": 3, **options}
    return timm.create_model(name, **options, **more).train()


def images(size: int, steps: int = 2, batch: int = 2) -> torch.Tensor:
    return torch.randn(steps, batch, 3, size, size, generator=torch.Generator().manual_seed(5))


def loss_of(output) -> torch.Tensor:
    outputs = output if isinstance(output, list | tuple) else [output]
    return sum((maps.float() ** 2).mean() for maps in outputs)


def train(model: nn.Module, batches: torch.Tensor, bf16: bool = False) -> dict[str, torch.Tensor]:
    """Losses, the last gradients, all parameters and buffers, and what is drawn next, after a step on each batch."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    result = {}
    for step, batch in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(batch)
        loss = loss_of(output)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result[f"loss {step}"] = loss.detach()
    result |= {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    result |= {f"state {n}": t.clone() for n, t in model.state_dict().items()}
    result["next random numbers"] = torch.rand(4)
    return result


def assert_same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(plain)
    different = [name for name, value in plain.items() if not torch.equal(ours[name], value)]
    assert not different, f"{len(different)} of {len(plain)} differ, first {different[:3]}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_without_and_keeps_less(name):
    plain = make(name)
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    batches = images(FAMILIES[name][0])
    assert bytes_kept(ours, batches[0]) < 0.8 * bytes_kept(plain, batches[0])
    ours.load_state_dict(plain.state_dict())  # the count above moved statistics, of both once
    assert_same(train(ours, batches), train(plain, batches))


def test_vgg_is_cut_at_its_pools():  # M05
    torch.manual_seed(0)
    plain = VGG([8, "M", 16, "M", 16, 16, "M", 32, 32, "M"], num_classes=3, norm_layer=nn.BatchNorm2d).train()
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    assert list(checkpointing.find_blocks(ours)) == ["features"]
    again = recomputed(copy.deepcopy(ours), images(64)[0], nn.BatchNorm2d)
    assert len(again) == 4  # the six convolutions have four pools, and what is after the last but one is left
    batches = images(64)
    assert bytes_kept(ours, batches[0]) < 0.4 * bytes_kept(plain, batches[0])
    ours.load_state_dict(plain.state_dict())
    assert_same(train(ours, batches), train(plain, batches))


def test_a_patched_stem_and_an_inserted_pool_stay():  # M05
    torch.manual_seed(0)
    plain = timm.create_model("test_convnext", num_classes=3).train()
    surgery.set_stem(plain, stride=2)
    surgery.insert_pool(plain, "stages.1.blocks.0", 2)
    surgery.pad_input(plain, (0, 8, 0, 0), "reflect")
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    batches = images(32)
    assert_same(train(ours, batches), train(plain, batches))


# M07
@pytest.mark.parametrize(
    ("name", "bf16"), [("tf_efficientnetv2_b0", False), ("test_efficientnet", True)], ids=["fp32", "bf16"]
)
def test_five_steps_move_statistics_as_five_plain_steps_do(name, bf16):
    torch.manual_seed(0)
    plain = timm.create_model(name, num_classes=1, drop_rate=0.3, drop_path_rate=0.3).train()
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    batches = images(64, steps=5)
    assert_same(train(ours, batches, bf16), train(plain, batches, bf16))
    assert {int(m.num_batches_tracked) for m in ours.modules() if isinstance(m, nn.BatchNorm2d)} == {5}
    with torch.no_grad():
        logits = plain.eval()(batches[0])
        assert logits.isfinite().all()
        assert torch.equal(ours.eval()(batches[0]), logits)


def test_convnext_tiny_keeps_a_fifth():
    plain = timm.create_model("convnext_tiny", num_classes=1).train()
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    (batch,) = images(64, steps=1)
    assert bytes_kept(ours, batch) <= bytes_kept(plain, batch) / 5


# Blocks


@pytest.mark.parametrize(
    ("name", "first", "last", "number"),  # as the classes in timm's source name their attributes
    [
        ("resnet50", "layer1.0", "layer4.2", 16),
        ("convnext_tiny", "stages.0.blocks.0", "stages.3.blocks.2", 18),
        ("efficientnet_b0", "blocks.0.0", "blocks.6.0", 16),
        ("vit_tiny_patch16_224", "blocks.0", "blocks.11", 12),
        ("densenet121", "features.denseblock1.denselayer1", "features.denseblock4.denselayer16", 58),
        ("swin_tiny_patch4_window7_224", "layers.0.blocks.0", "layers.3.blocks.1", 12),
        ("regnety_032", "s1.b1", "s4.b1", 21),
        ("inception_v3", "Mixed_5b", "Mixed_7c", 11),
        ("dla34", "level2", "level5", 6),  # level3 and level4 are trees of two trees each
        ("test_byobnet", "stages.0.0", "stages.3.0", 4),
        ("vit_base_patch16_siglip_224", "blocks.0", "blocks.11", 12),  # without the head's attention pool
        ("tresnet_m", "body.layer1.0", "body.layer4.2", 21),
    ],
)
def test_blocks_are_those_of_the_architecture(name, first, last, number):
    with torch.device("meta"):
        names = list(checkpointing.find_blocks(timm.create_model(name)))
    assert (names[0], names[-1], len(names)) == (first, last, number)


@pytest.mark.parametrize(
    "name", ["hgnetv2_b0", "lowformer_b0", "cs3darknet_focus_s", "crossvit_9_240", "legacy_xception"]
)
def test_no_block_is_inside_another(name):
    with torch.device("meta"):
        model = timm.create_model(name)
        blocks = checkpointing.find_blocks(model)
    inside = [part for block in blocks.values() for part in block.modules()]
    assert len(inside) == len(set(inside))
    assert len(blocks) > 5


def recomputed(model: nn.Module, batch: torch.Tensor, kind: type = nn.Module) -> list[str]:
    """Names of the modules of a class, of any with children otherwise, that run in backward."""
    seen, handles = [], []
    output = model(batch)
    for name, module in model.named_modules():
        if isinstance(module, kind) and (kind is not nn.Module or list(module.children())):
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: seen.append(name)))
    loss_of(output).backward()
    for handle in handles:
        handle.remove()
    return seen


def test_the_last_stage_is_left_and_of_one_stage_the_last_block():
    (batch,) = images(32, steps=1)
    again = recomputed(checkpointing.checkpoint_blocks(make("test_convnext")), batch)
    assert {name.split(".")[1] for name in again} == {"0", "1", "2"}  # stages.3 of four is left
    again = recomputed(checkpointing.checkpoint_blocks(make("test_vit")), batch)
    assert {name.split(".")[1] for name in again} == {"0", "1", "2", "3", "4"}  # blocks.5 of six
    assert len(again) == len(set(again))  # each once


def test_timms_own_checkpointing_gives_way():
    plain = make("test_convnext")
    plain.set_grad_checkpointing()
    again = recomputed(checkpointing.checkpoint_blocks(plain), images(32, steps=1)[0])
    assert again and len(again) == len(set(again))
    assert not any(getattr(module, "grad_checkpointing", False) for module in plain.modules())


@pytest.mark.parametrize("kind", ["linear", "vgg"])  # M05
def test_a_model_without_blocks_is_left_with_a_warning(kind, capsys):
    model = nn.Linear(2, 2)
    if kind == "vgg":  # what features_only makes of it: single layers, called one by one
        model = FeatureListNet(VGG([8, "M", 16, "M"]), out_indices=(0, 1), flatten_sequential=True)
    with pytest.warns(UserWarning, match="no block"):
        assert checkpointing.checkpoint_blocks(model) is model
    assert capsys.readouterr() == ("", "")


def test_twice_is_once_and_there_is_a_way_back():
    model = make("test_resnet")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once = [vars(m).get("forward") for m in checkpointing.checkpoint_blocks(model).modules()]
        assert any(once)
        assert [vars(m).get("forward") for m in checkpointing.checkpoint_blocks(model).modules()] == once
        assert list(model.state_dict()) == keys
        checkpointing.checkpoint_blocks(model, False)
        checkpointing.checkpoint_blocks(model, False)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


# Modes and states


class Block(nn.Module):
    """Two convolutions with something between them, around a shortcut."""

    def __init__(self, between: nn.Module, channels: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.between = between
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(self.between(self.conv1(x)).relu())


class Counter(nn.Module):
    """Counts its forward passes, in place and by assignment, and keeps a running mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.added += 1
            self.assigned = self.assigned + 1
            self.mean.lerp_(x.detach().mean(), 0.1)
        return x * 2


def blocks_of(make_between, number: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(*(Block(make_between()) for _ in range(number)))).train()


@pytest.mark.parametrize(
    "make_between",
    [
        lambda: nn.BatchNorm2d(4, momentum=None),  # a mean over all steps
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        lambda: EvoNorm2dB0(4),
        lambda: nn.Sequential(nn.Dropout2d(0.5), nn.AlphaDropout(0.3), nn.RReLU()),
        Counter,
    ],
    ids=["cumulative", "instance", "evo", "random", "counter"],
)
def test_what_moves_in_forward_moves_once(make_between):
    plain = blocks_of(make_between)
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    batches = images(8, steps=3)
    assert_same(train(ours, batches), train(plain, batches))
    buffers = dict(plain.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in ours.named_buffers())


def test_evaluation_and_no_grad_take_the_plain_path(monkeypatch):
    model = checkpointing.checkpoint_blocks(make("test_resnet"))
    (batch,) = images(32, steps=1)
    calls = []
    monkeypatch.setattr(
        checkpointing, "checkpoint", lambda function, *args, **options: calls.append(1) or function(*args)
    )
    with torch.no_grad():
        model(batch)
    with torch.inference_mode():
        model(batch)
    model.eval()(batch)
    assert not calls
    model.train()(batch)
    assert calls


def test_frozen_norms_stay_frozen():
    plain = make("test_resnet")
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    batches = images(32)
    assert_same(train(ours, batches), train(plain, batches))
    assert all(
        torch.equal(m.running_mean, torch.zeros_like(m.running_mean))
        for m in ours.modules()
        if hasattr(m, "running_mean")
    )


def test_the_second_pass_is_in_the_mode_of_the_first():
    plain = make("resnet10t")
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    (batch,) = images(32, steps=1)
    for model in (plain, ours):
        torch.manual_seed(2)
        loss = loss_of(model(batch))
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
    gradients = [[p.grad for p in model.parameters()] for model in (ours, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_accumulated_gradients_are_those_of_the_plain_model():
    """Two passes before backward: the first is computed again after the second has moved the statistics."""
    plain = make("test_resnet")
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    first, second = images(32)
    for model in (plain, ours):
        (loss_of(model(first)) + loss_of(model(second))).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(ours.buffers(), plain.buffers(), strict=True))


def test_backward_can_be_called_again():
    plain = blocks_of(lambda: nn.BatchNorm2d(4))
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    for model in (plain, ours):
        loss = loss_of(model(images(8, steps=1)[0]))
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in zip(ours.buffers(), plain.buffers(), strict=True))


def test_a_block_in_several_places_runs_twice_not_more():
    model = blocks_of(lambda: nn.Sequential(nn.Identity()))
    model.insert(1, nn.Sequential(model[1][0]))
    again = recomputed(checkpointing.checkpoint_blocks(model), images(8, steps=1)[0])
    assert sorted(again) == ["1.0.between", "1.0.between", "2.1.between", "2.2.between"]
    assert list(checkpointing.find_blocks(model)) == ["1.0", "2.1", "2.2", "2.3"]


def test_an_error_in_the_second_pass_leaves_no_trace():
    model = checkpointing.checkpoint_blocks(blocks_of(lambda: nn.BatchNorm2d(4)))
    loss = loss_of(model(images(8, steps=1)[0]))

    def fail(*_) -> None:
        assert model[1][0].between.training  # as in the first pass
        raise RuntimeError("planned")

    model[1][0].conv2.register_forward_pre_hook(fail)
    model.eval()
    buffers, state = dict(model.named_buffers()), copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="planned"):
        loss.backward()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())


class Odd(nn.Module):
    """A block that takes a list and keyword arguments, and gives a dict with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, maps: list[torch.Tensor], *, extra: dict, scale: float = 1.0) -> dict:
        x = self.conv1(sum(maps)).sigmoid()
        return {"pair": (self.conv2(x) * scale, x + extra["added"]), "number": len(maps)}


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.rows = nn.ModuleList(Odd() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.stem(x)]
        for row in self.rows:
            extra = {"added": maps[-1]}
            out = row(maps, extra=extra, scale=0.5)
            assert out["number"] == len(maps)
            maps.append(out["pair"][0] + out["pair"][1])
            extra["added"] = None  # what was given may change after the call
        return maps[-1]


def test_lists_dicts_and_keywords_pass_through():
    torch.manual_seed(0)
    plain = OddNet().train()
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    assert recomputed(copy.deepcopy(ours), images(8, steps=1)[0]) == []  # its parts have no children
    batches = images(8)
    assert_same(train(ours, batches), train(plain, batches))


# With others


def test_the_average_of_the_weights_follows():  # T11
    plain = make("test_efficientnet")
    results = []
    for model in (plain, checkpointing.checkpoint_blocks(copy.deepcopy(plain))):
        average = ModelEmaV3(model, decay=0.5)
        for batch in images(32, steps=3):
            train(model, batch[None])
            average.update(model)
        with torch.no_grad():
            results.append({"logits": average.module(images(32)[0]), **average.module.state_dict()})
    assert_same(results[1], results[0])
    raw = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    twin = copy.deepcopy(raw)
    train(twin, images(32))
    assert all(torch.equal(p, q) for p, q in zip(raw.parameters(), plain.parameters(), strict=True))


def test_a_method_replaced_before_or_after_is_called_in_both_passes():
    plain = blocks_of(lambda: nn.BatchNorm2d(4))

    def doubled(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return 2 * patching.original(block, "forward")(x)

    for block in plain[1]:
        patching.replace_method(block, "forward", doubled)
    before = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    after = blocks_of(lambda: nn.BatchNorm2d(4))
    checkpointing.checkpoint_blocks(after)
    for block in after[1]:
        patching.replace_method(block, "forward", doubled)
    checkpointing.checkpoint_blocks(after)  # once more: it is checkpointed underneath
    batches = images(8)
    expected = train(plain, batches)
    assert_same(train(before, batches), expected)
    assert_same(train(after, batches), expected)
    with pytest.raises(ValueError, match="replaced"):
        checkpointing.checkpoint_blocks(after, False)


def test_autocast_around_and_inside():
    class Inside(nn.Module):
        def __init__(self, blocks: nn.Module) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                half = self.blocks(x)
            return self.blocks(half.float())

    plain = Inside(blocks_of(lambda: nn.BatchNorm2d(4)))
    plain.blocks[0] = nn.Conv2d(4, 4, 1)
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    batches = torch.randn(2, 2, 4, 8, 8)
    for bf16 in (False, True):
        assert_same(train(ours, batches, bf16), train(plain, batches, bf16))


@pytest.mark.parametrize("once", [True, False], ids=["in the graph", "beside the graph"])
def test_compiled_it_gives_what_the_plain_model_gives(once, monkeypatch):
    """By the way of torch from 2.14, where one graph holds the model, and by that of older ones, which break it."""
    if once and not checkpointing.COMPILED_MOVES_ONCE:
        pytest.skip("this torch moves statistics twice")
    monkeypatch.setattr(checkpointing, "COMPILED_MOVES_ONCE", once)
    plain = blocks_of(lambda: nn.BatchNorm2d(4))
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    batches = images(8)
    expected = train(plain, batches)
    torch.compiler.reset()
    found = train(torch.compile(ours, backend="aot_eager", fullgraph=once), batches)
    assert_same({name.replace("_orig_mod.", ""): value for name, value in found.items()}, expected)


def test_the_kits_own_model():
    config = ModelConfig(backbone="test_efficientnet", weights="none", neck="none", drop_path=0.2)
    torch.manual_seed(0)
    plain = build_model(config).train()
    ours = checkpointing.checkpoint_blocks(copy.deepcopy(plain))
    names = list(checkpointing.find_blocks(ours))
    assert names and all(name.startswith("backbone.") for name in names)
    results = []
    for model in (ours, plain):
        torch.manual_seed(3)
        model(torch.rand(2, 1, 64, 32, generator=torch.Generator().manual_seed(0)))["cancer"].square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append(gradients | {name: value.clone() for name, value in model.state_dict().items()})
    assert_same(*results)


def test_many_blocks_are_looked_after_once(monkeypatch):
    """Whether a model was compiled is asked of all objects alive, which takes a tenth of a second and more."""
    asked = []
    monkeypatch.setattr(checkpointing.patching, "compiled_holder", asked.append)
    model = make("test_resnet")
    checkpointing.checkpoint_blocks(model)
    assert len([m for m in model.modules() if any(checkpointing._ours(m))]) > 1 and asked == [model]
    checkpointing.checkpoint_blocks(model, False)
    assert asked == [model, model]
