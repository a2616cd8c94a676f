"""rsnakit.cost: counts against closed forms, torchinfo and real runs; what is kept, allocation by allocation."""

import copy
import dataclasses
import types

import pytest
import timm
import torch
import torch.nn.functional as F
import torchinfo
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rsnakit import cost


class TwoBlocks(nn.Module):
    """Two blocks of a kind, computed again in backward where asked."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Sigmoid()) for _ in "ab")
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def kept_in_a_real_run(model: nn.Module, x: torch.Tensor, half: torch.dtype | None = None) -> int:
    """Bytes of the storages that autograd saves on the CPU, each once, without the weights' and the input's."""
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autocast("cpu", half, enabled=half is not None), saved_tensors_hooks(keep, lambda t: t):
        out = model(x)  # alive until counted
    total = sum(t.untyped_storage().nbytes() for t in saved.values())
    del out
    return total


def real_share(model: nn.Module, size: tuple[int, ...], half: torch.dtype | None = None) -> float:
    one, two = (kept_in_a_real_run(copy.deepcopy(model).train(), torch.rand(n, *size), half) for n in (2, 4))
    return (two - one) / 2


# Multiply-adds


def test_macs_of_a_convolution_and_of_a_perceptron():
    conv = nn.Conv2d(6, 10, (5, 3), stride=2, padding=1, groups=2)
    out = ((16 + 2 - 5) // 2 + 1) * ((20 + 2 - 3) // 2 + 1)
    assert cost.estimate(conv, (6, 16, 20)).macs == out * 10 * (6 // 2) * 5 * 3
    perceptron = nn.Sequential(nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 7))
    found = cost.estimate(perceptron, (3, 4, 4))
    assert (found.macs, found.parameters) == (48 * 20 + 20 * 7, 49 * 20 + 21 * 7)
    assert found.kept_bytes == 4 * 20  # ReLU's result, which the next layer keeps too


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_macs_of_attention(device):
    tokens, width, mlp = (160 // 16) ** 2 + 1, 64, 192
    model = timm.create_model("test_vit")
    assert (model.embed_dim, model.blocks[0].mlp.fc1.out_features, len(model.blocks)) == (width, mlp, 6)
    block = tokens * width * (3 * width + width + 2 * mlp) + 2 * tokens * tokens * width
    expected = 6 * block + (tokens - 1) * 3 * 16 * 16 * width + width * 1000
    assert cost.estimate(model, (3, 160, 160), device=device).macs == expected


def test_what_attention_keeps_on_a_gpu():
    class Attends(nn.Module):
        def __init__(self, shape: tuple[int, ...], masked: bool = False) -> None:
            super().__init__()
            self.scale, self.shape, self.masked = nn.Parameter(torch.ones(())), shape, masked

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (x * self.scale).reshape(len(x), *self.shape)
            mask = torch.ones(64, 64, dtype=torch.bool, device=x.device) if self.masked else None
            return F.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=mask)

    tokens, heads = (2, 64, 8), 2 * 64  # two heads, 64 tokens of 8 numbers; a logarithm for each head's token
    values = 4 * 2 * 64 * 8
    for masked in (False, True):
        found = cost.estimate(Attends(tokens, masked), (1, 32, 32))
        assert found.kept_bytes == 2 * values + 4 * heads  # of queries, keys and values in one, and of the result
        assert found.macs == 2 * 2 * 64 * 64 * 8
    plain = cost.estimate(Attends((1, *tokens)), (1, 32, 32))  # of five dimensions: no kernel for that, here or there
    assert plain.kept_bytes >= 4 * 2 * 64 * 64
    assert plain.macs == found.macs


def test_modules_that_want_a_real_gpu_count_as_on_the_cpu():
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x.flatten(1, 2))[0]

    found, on_cpu = (cost.estimate(Sequence(), (8, 8, 8), device=device) for device in ("cuda", "cpu"))
    assert found == on_cpu and found.kept_bytes >= 4 * 64 * 4  # the states


def test_macs_are_torchinfos():
    model = timm.create_model("test_resnet")
    table = torchinfo.summary(copy.deepcopy(model), (1, 3, 96, 96), verbose=0)
    leaves = [layer for layer in table.summary_list if isinstance(layer.module, nn.Conv2d | nn.Linear)]
    biases = sum(m.bias.numel() for m in model.modules() if isinstance(m, nn.Linear))  # which torchinfo counts
    assert cost.estimate(model, (3, 96, 96)).macs == sum(layer.macs for layer in leaves) - biases


# What is kept for backward


@pytest.mark.parametrize(
    ("name", "side"),
    [("test_resnet", 64), ("test_convnext", 64), ("test_vit", 160), ("test_nfnet", 64)],
)
def test_kept_bytes_are_a_real_runs(name, side):
    model = timm.create_model(name, drop_rate=0.1, drop_path_rate=0.1)
    size = (3, side, side)
    plain = cost.estimate(model, size, device="cpu")
    assert plain.kept_bytes == real_share(model, size)
    half = cost.estimate(model, size, "bf16", device="cpu")
    assert half.kept_bytes == pytest.approx(real_share(model, size, torch.bfloat16), rel=0.01)
    assert 0.4 * plain.kept_bytes < half.kept_bytes < 0.9 * plain.kept_bytes
    # On a GPU attention keeps a little more, and dropout's masks are bytes.
    assert cost.estimate(model, size).kept_bytes == pytest.approx(plain.kept_bytes, rel=0.01)


def test_autocast_on_a_gpu_has_norms_in_float32():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8))
    values, statistics = 8 * 16 * 16, 2 * 2 * 4  # mean and deviation of each group
    image = 2 * 3 * 16 * 16  # the input in half precision
    assert cost.estimate(model, (3, 16, 16), "bf16").kept_bytes == image + 4 * values + statistics
    on_cpu = cost.estimate(model, (3, 16, 16), "fp16", device="cpu")
    assert on_cpu.kept_bytes == image + 2 * values + statistics // 2
    weight = 8 * 3 * 3 * 3
    assert on_cpu.weight_bytes == 4 * (weight + 8 + 16) + 2 * weight  # and its copy, which the convolution keeps


def test_checkpointing_shows_in_what_is_kept_and_in_what_backward_needs():
    plain, again = (cost.estimate(TwoBlocks(a), (8, 32, 32), memory_gb=4, device="cpu") for a in (False, True))
    maps = 4 * 8 * 32 * 32
    # GELU keeps what the convolution gives, Sigmoid what it gives itself: two maps a block. The input is not counted.
    assert (plain.kept_bytes, again.kept_bytes) == (4 * maps, maps)
    assert again.backward_bytes >= plain.backward_bytes + maps
    assert again.batch > plain.batch
    assert cost.estimate(TwoBlocks(True), (8, 32, 32)).kept_bytes == maps


def test_checkpoint_blocks_shows_too():
    from rsnakit import checkpointing

    model = timm.create_model("test_convnext")
    plain = cost.estimate(model, (3, 64, 64), device="cpu").kept_bytes
    checkpointing.checkpoint_blocks(model)
    found = [cost.estimate(model, (3, 64, 64), device=device).kept_bytes for device in ("cpu", "cuda")]
    assert found[0] == real_share(model, (3, 64, 64)) < 0.8 * plain
    assert found[1] <= found[0]


def test_the_peak_is_that_of_the_cpus_allocator():
    model = timm.create_model("test_resnet")
    found = cost.estimate(model, (3, 96, 96), memory_gb=4, device="cpu")
    x = torch.rand(32, 3, 96, 96)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x).sum().backward()
    total = peak = 0
    for event in sorted(
        (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        total += event.nbytes()
        peak = max(peak, total)
    predicted = 32 * (found.kept_bytes + found.backward_bytes)
    assert peak == pytest.approx(predicted + found.gradient_bytes, rel=0.1)


# What does not grow, and the largest batch


def test_bytes_that_do_not_grow_count_tied_and_frozen_weights_as_they_are():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Flatten(), nn.BatchNorm1d(10))
    model[1].weight = model[0].weight
    model[3].requires_grad_(False)
    found = cost.estimate(model, (1, 1, 10), optimizer_bytes=4, ema=True)
    assert (found.parameters, found.trainable) == (100 + 20 + 20, 120)
    weights = 4 * 140 + 4 * 20 + 8  # with the running statistics and their counter
    assert found.weight_bytes == weights + 80  # and the batch's own statistics
    assert found.gradient_bytes == 480
    assert (found.optimizer_bytes, found.ema_bytes) == (480, weights)
    assert found.fixed_bytes == 2 * weights + 80 + 960
    assert found.batch is None and found.backward_bytes is None


def test_the_largest_batch_fills_the_room():
    model = timm.create_model("test_resnet")
    found = cost.estimate(model, (3, 64, 64), memory_gb=16)
    room = (16e9 - 1e9) * 0.85 - found.fixed_bytes
    image = found.kept_bytes + found.input_bytes + found.backward_bytes
    assert found.batch * image <= room < (found.batch + 1) * image
    assert found.input_bytes == 4 * 3 * 64 * 64
    assert cost.estimate(model, (3, 64, 64), memory_gb=0.5).batch == 0
    more = cost.estimate(model, (3, 128, 128), memory_gb=16)
    assert 0.2 < more.batch / found.batch < 0.3


def test_the_peak_leaves_out_what_was_there_before():
    found = cost.estimate(nn.Linear(4096, 1, bias=False), (1, 1, 4096), memory_gb=4)
    # At a batch of 256 neither the weight nor the input, but the weight's gradient, once, and a few numbers an image.
    assert found.backward_bytes <= 4 * 4096 / 256 + 40


def test_frozen_models_keep_nothing():
    model = nn.Conv2d(3, 8, 3).requires_grad_(False)
    found = cost.estimate(model, (3, 32, 32), memory_gb=4)
    assert (found.kept_bytes, found.trainable, found.gradient_bytes) == (0, 0, 0)


def test_huge_inputs_take_no_memory():
    found = cost.estimate(timm.create_model("test_resnet"), (3, 8192, 8192), memory_gb=16)
    assert found.kept_bytes > 14e9 and found.batch == 0


# Inputs


def test_batches_and_breasts():
    class OfBreasts(nn.Module):
        def __init__(self, views: str) -> None:
            super().__init__()
            self.conv, self.config = nn.Conv2d(1, 4, 3, padding=1), types.SimpleNamespace(views=views)

        def forward(self, x: torch.Tensor, view_mask=None, view_id=None) -> dict[str, torch.Tensor]:
            if x.ndim == 5:
                assert view_id.shape == x.shape[:2] and view_id.dtype == torch.int64
                x = x.flatten(0, 1)
            return {"cancer": self.conv(x).mean((1, 2, 3))}

    image = cost.estimate(OfBreasts("none"), (1, 16, 8)).macs
    assert image == 16 * 8 * 4 * 9
    assert cost.estimate(OfBreasts("none"), (5, 1, 16, 8)).macs == image
    assert cost.estimate(OfBreasts("mean"), (5, 1, 16, 8), memory_gb=16).macs == 5 * image
    assert cost.estimate(OfBreasts("mean"), (2, 5, 1, 16, 8)).macs == 5 * image


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((1, 160, 160), "(?s)test_vit.*to have 3 channels.*made for .3, 160, 160., a size that timm calls fixed"),
        ((3, 100, 100), "test_vit.*100"),
        ((3, 0, 160), "whole numbers"),
        (160, "160"),
        ((3, 160), "fails on an input"),
    ],
)
def test_wrong_inputs_are_named(size, message):
    model = timm.create_model("test_vit")
    with pytest.raises(ValueError, match=message):
        cost.estimate(model, size)


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"'half'.*there are fp32, bf16, fp16"):
        cost.estimate(nn.ReLU(), (3, 8, 8), precision="half")
    with pytest.raises(ValueError, match="tpu"):
        cost.estimate(nn.ReLU(), (3, 8, 8), device="tpu")
    for name, value in (
        *(("memory_gb", value) for value in ("16", -1, float("nan"), float("inf"), True)),
        *(("optimizer_bytes", value) for value in (-8, "8", None)),
    ):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; expected a number from 0"):
            cost.estimate(nn.Conv2d(3, 1, 1), (3, 8, 8), **{name: value})


# No trace


@pytest.mark.parametrize("failing", [False, True])
def test_it_leaves_no_trace(failing):
    model = timm.create_model("test_efficientnet", drop_rate=0.5).train()
    model.blocks[0].eval()
    before, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    state, hooks = torch.get_rng_state(), sum(len(m._forward_hooks) for m in model.modules())
    if failing:
        with pytest.raises(ValueError):
            cost.estimate(model, (5, 64, 64), "bf16")
    else:
        cost.estimate(model, (3, 64, 64), "bf16", memory_gb=16)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(v, before[k]) and v.device.type == "cpu" for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cuda") == torch.float16


def test_norms_frozen_by_hand_stay_frozen_in_the_count():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    model[1].eval()
    frozen = cost.estimate(model, (3, 32, 32), device="cpu")
    assert frozen.weight_bytes < cost.estimate(model.eval(), (3, 32, 32), device="cpu").weight_bytes  # batch statistics


def test_models_in_half_precision_of_their_own():
    model = timm.create_model("test_resnet")
    plain, half = (cost.estimate(m, (3, 64, 64)) for m in (model, copy.deepcopy(model).bfloat16()))
    assert half.gradient_bytes == plain.gradient_bytes / 2
    assert half.kept_bytes < 0.6 * plain.kept_bytes


# The table


def test_table_and_text():
    model = timm.create_model("test_resnet")
    costs = {str(size): cost.estimate(model, (3, size, size), memory_gb=16) for size in (64, 128)}
    table = cost.table(costs)
    assert list(table.index) == ["64", "128"]
    assert table.loc["64", "M parameters"] == round(sum(p.numel() for p in model.parameters()) / 1e6, 2)
    assert table.loc["128", "G MACs an image"] == pytest.approx(costs["128"].macs / 1e9, abs=0.001)
    assert table.loc["128", "batch in 16 GB"] == costs["128"].batch
    assert "batch in 16 GB" in str(costs["64"])
    bare = dataclasses.replace(costs["64"], batch=None)
    assert not any("batch" in column for column in cost.table({"a": bare}))
