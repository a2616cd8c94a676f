"""The dry run: shapes as a real pass has them, and no trace of it."""

import copy

import pytest
import timm
import torch
from torch import nn

from rsnakit import dryrun


class TwoInOne(nn.Module):
    """One weight under two names, and a result of several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, list[torch.Tensor]]:
        return {"both": [self.first(x), self.second(x) * scale]}

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)[:, :2]


@pytest.mark.parametrize(
    "name",
    ["test_resnet", "test_efficientnet", "test_convnext", "test_vit", "test_mambaout", "test_nfnet", "fastvit_t8"],
)
def test_shapes_are_those_of_a_real_pass(name):
    model = timm.create_model(name, in_chans=1, num_classes=0, global_pool="").eval()
    size = 160 if name == "test_vit" else 96
    x = torch.rand(2, 1, size, size)
    with torch.no_grad():
        expected = model(x)
        maps = model.forward_intermediates(x, intermediates_only=True)
    assert dryrun.run(model, x).shape == expected.shape
    options = {"method": "forward_intermediates", "intermediates_only": True}
    assert [m.shape for m in dryrun.run(model, x, **options)] == [m.shape for m in maps]


def test_it_leaves_no_trace():
    model = timm.create_model("test_efficientnet", drop_rate=0.5, drop_path_rate=0.5).train()
    model.blocks[0].eval()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    state = torch.get_rng_state()
    names = [name for name, _ in model.named_modules() if name]
    dryrun.run(model, torch.empty(4, 3, 64, 64, device="meta"), grad=True).sum().backward()
    found = dryrun.shapes(model, names, torch.empty(4, 3, 64, 64))
    assert found["conv_stem"] == ((4, 3, 64, 64), (4, 24, 32, 32))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_modules_that_stand_in_two_places_are_as_before():
    model = timm.create_model("coat_tiny", num_classes=0).eval()
    dryrun.run(model, torch.empty(1, 3, 224, 224))
    assert not [
        n
        for n, m in model.named_modules()
        for t in (*m._parameters.values(), *m._buffers.values())
        if t is not None and t.is_meta
    ]


def test_tables_kept_by_device_are_as_before():
    model = timm.create_model("levit_128s").eval()
    dryrun.run(model, torch.empty(1, 3, 224, 224))
    kept = [m.attention_bias_cache for m in model.modules() if hasattr(m, "attention_bias_cache")]
    assert kept and not any(kept)


def test_no_trace_after_an_error_either():
    model = timm.create_model("test_resnet")
    with pytest.raises(RuntimeError):
        dryrun.shapes(model, ["conv1"], torch.empty(1, 5, 64, 64))
    assert not any(m._forward_hooks for m in model.modules())
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_tied_weights_stay_tied():
    kept: list[torch.Tensor] = []
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = dryrun.run(TwoInOne(), x, grad=True)
    assert [t.shape for t in out["both"]] == [(3, 4), (3, 4)]
    weights = [t for t in kept if t.shape == (4, 4)]  # both layers keep the weight, for the gradient of x
    assert len(weights) == 2 and len({t.untyped_storage()._cdata for t in weights}) == 1


def test_other_methods_types_and_results():
    model = TwoInOne()
    assert dryrun.run(model, torch.empty(3, 4), method="half").shape == (3, 2)
    assert (
        dryrun.run(model.to(torch.bfloat16), torch.empty(3, 4, dtype=torch.bfloat16), scale=2.0)["both"][1].dtype
        == torch.bfloat16
    )
    assert dryrun.first_tensor({"a": None, "b": [(), (torch.zeros(2),)]}).shape == (2,)
    assert dryrun.first_tensor(["x", 1]) is None


def test_hundreds_of_millions_of_weights_take_no_memory():
    with torch.device("meta"):
        model = timm.create_model("vit_giant_patch14_224", num_classes=0)
    assert dryrun.run(model, torch.empty(8, 3, 224, 224, device="meta")).shape == (8, 1408)
