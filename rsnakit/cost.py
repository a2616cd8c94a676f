"""What a model costs, before it is trained: parameters, multiply-adds, memory, and a guess of the largest batch.

The training step is run on fake tensors (see `anatomy.fake_model`): on this machine it takes no memory and computes
nothing, and it goes the ways that it would go on a GPU, whether or not there is one.
"""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rsnakit import anatomy

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
RESERVE_GB = 1.0  # for the CUDA context and its libraries, and what other programs hold
USABLE = 0.85  # share of what is left, for workspaces of convolutions and gaps between the allocator's blocks
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a model costs; see `estimate`. Bytes are bytes, an image is a breast where the input is one.

    Attributes:
        input_size: of one image or breast, without a batch.
        precision: fp32, bf16 or fp16; the latter two by autocast over the model's own weights.
        parameters, trainable: how many; tied weights count once.
        macs: multiply-adds of the forward pass, an image: convolutions, matrix products and attention; nothing
            else, so not a fused LSTM's.
        kept_bytes: what a training step keeps for backward, an image; neither the input nor weights are in it.
        input_bytes: of an image as the model gets it.
        weight_bytes, gradient_bytes, optimizer_bytes, ema_bytes: whatever the batch is. Weights include buffers, and what
            is kept for backward of the weights alone: under autocast their copies in half precision.
        memory_gb: as it was given; without it the following are None.
        backward_bytes: what backward needs at its peak beside what was kept, an image: gradients on their way, and what
            checkpointed blocks compute again.
        batch: a guess of the most images a step has room for; 0 where not one fits.
    """

    input_size: tuple[int, ...]
    precision: str
    parameters: int
    trainable: int
    macs: int
    kept_bytes: int
    input_bytes: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    ema_bytes: int
    memory_gb: float | None = None
    backward_bytes: int | None = None
    batch: int | None = None

    @property
    def fixed_bytes(self) -> int:
        """What does not grow with the batch."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.ema_bytes

    def __str__(self) -> str:
        return table({"": self}).T.to_string(header=False)


def estimate(
    model: nn.Module,
    input_size: Sequence[int],
    precision: str = "fp32",
    memory_gb: float | None = None,
    optimizer_bytes: int = 8,
    ema: bool = False,
    device: str = "cuda",
) -> Cost:
    """What training a model costs, counted without running it: the model, its gradients and random numbers stay as they are.

    What is kept for backward is counted tensor by tensor, as autograd saves it, in training mode (where the model is in
    evaluation, else with its modules' own flags) at batches of 2 and 4: the difference is an image's share. On `cpu` this
    equals a real run's. On `cuda` attention is taken as memory-efficient attention, and autocast follows the GPU's rules
    (norms in float32, for one), which keep more than the CPU's do. The few modules that cannot be asked without a GPU (an
    LSTM) count as on the CPU.

    The largest batch is a guess that no GPU has confirmed: of `memory_gb` 1 GB is set aside for CUDA itself and 15 % of the
    rest for workspaces and gaps between the allocator's blocks; what remains, less what does not grow with the batch, is
    divided by what an image needs at the peak of the step, backward included (which is followed allocation by allocation
    at a batch of 256, by the CPU's rules). Try a little less first. With several GPUs it's for each, and their exchange of
    gradients takes up to `gradient_bytes` more.

    Args:
        input_size: (C, H, W) of an image. A batch in front changes nothing. (V, 1, H, W) is a breast of V views where the
            model's `config.views` says so, (B, V, 1, H, W) always.
        precision: fp32 (the model's own type), bf16 or fp16 (autocast).
        memory_gb: of the GPU, in units of 10^9 bytes.
        optimizer_bytes: for each trainable parameter: 8 for AdamW, 4 for SGD with momentum.
        ema: whether a second set of weights is averaged.
        device: cuda or cpu, where the step is to run.

    Raises:
        ValueError: no such precision or device, bytes or memory that are no number from 0, or the model fails on such an input
            (what it wants is said).
    """
    if precision not in PRECISIONS or device not in ("cuda", "cpu"):
        raise ValueError(f"precision={precision!r}, device={device!r}: there are {', '.join(PRECISIONS)}; cuda, cpu")
    for name, value in (("memory_gb", memory_gb), ("optimizer_bytes", optimizer_bytes)):
        wrong = isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf
        if wrong and not (name == "memory_gb" and value is None):
            raise ValueError(
                f"{name} is {value!r}; expected a number from 0, such as {name}={16 if name[0] == 'm' else 8}"
            )
    size = _item_size(model, input_size)
    half = PRECISIONS[precision]
    for kind in dict.fromkeys((device, "cpu")):
        try:
            with _fake_in_training(model, kind) as fake:
                small, large = (_forward(fake, anatomy.fake_input(fake, (n, *size)), half) for n in (2, 4))
            backward = None if memory_gb is None else _backward(model, size, half)
            break
        except Exception as error:  # a model may raise anything
            failure = error
    else:
        raise anatomy.refusal(model, input_size, failure) from failure
    macs, kept, given = ((b - a) // 2 for a, b in zip(small, large, strict=True))
    tensors = [*model.parameters(), *model.buffers()]  # tied ones once
    weights = sum(t.numel() * t.element_size() for t in tensors)
    trainable = [p for p in model.parameters() if p.requires_grad]
    cost = Cost(
        input_size=size,
        precision=precision,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in trainable),
        macs=macs,
        kept_bytes=kept,
        input_bytes=given,
        weight_bytes=weights + small[1] - 2 * kept,
        gradient_bytes=sum(p.numel() * p.element_size() for p in trainable),
        optimizer_bytes=optimizer_bytes * sum(p.numel() for p in trainable),
        ema_bytes=weights if ema else 0,
    )
    if memory_gb is None:
        return cost
    room = USABLE * 1e9 * (memory_gb - RESERVE_GB) - cost.fixed_bytes
    batch = max(0, math.floor(room / (kept + given + backward)))
    return dataclasses.replace(cost, memory_gb=memory_gb, backward_bytes=backward, batch=batch)


def table(costs: Mapping[str, Cost]) -> pd.DataFrame:
    """Costs under each other, a row each, in units that can be read; M is 10^6, G 10^9."""
    rows = {
        name: {
            "input": "x".join(map(str, cost.input_size)),
            "precision": cost.precision,
            "M parameters": round(cost.parameters / 1e6, 2),
            "G MACs an image": round(cost.macs / 1e9, 3),
            "MB kept an image": round(cost.kept_bytes / 1e6, 1),
            "MB fixed": round(cost.fixed_bytes / 1e6, 1),
            **({} if cost.batch is None else {f"batch in {cost.memory_gb:g} GB": cost.batch}),
        }
        for name, cost in costs.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def _item_size(model: nn.Module, input_size: Sequence[int]) -> tuple[int, ...]:
    """The size of an image or breast, without its batch."""
    size = tuple(input_size) if isinstance(input_size, Sequence) else (input_size,)
    breasts = getattr(getattr(model, "config", None), "views", "none") != "none"
    return size[1:] if len(size) == 5 or (len(size) == 4 and not breasts) else size


def _forward(model: nn.Module, x: torch.Tensor, half: torch.dtype | None) -> tuple[int, int, int]:
    """Multiply-adds of a forward pass, bytes that it keeps for backward, and the input's bytes."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), x)}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no other gets the number

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    counter = anatomy.mult_adds_counter()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.enable_grad(), _autocast(x.device.type, half), hooks, counter, _GpuAttention():
        model(x, **anatomy.view_options(model, x))
    return counter.get_total_flops() // 2, sum(s.nbytes() for s in kept.values()), x.numel() * x.element_size()


def _backward(model: nn.Module, size: tuple[int, ...], half: torch.dtype | None, batch: int = 256) -> int:
    """Bytes an image that a step needs at its peak, beyond the weights, the input, and what forward keeps."""
    with _fake_in_training(model, "cpu") as fake:  # backward on a GPU that isn't there, not even fake tensors can
        x = anatomy.fake_input(fake, (batch, *size))
        before = _forward(fake, x, half)[1]
        with torch.enable_grad(), _Allocations() as allocations:
            with _autocast("cpu", half):
                out = fake(x, **anatomy.view_options(fake, x))
            logits = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
            if logits:
                sum(t.float().sum() for t in logits).backward()
    return max(0, allocations.peak - before) // batch


class _Allocations(TorchDispatchMode):
    """The most bytes that tensors made under it take at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in old and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    def _free(self, size: int) -> None:
        self.bytes -= size


@contextlib.contextmanager
def _fake_in_training(model: nn.Module, device: str) -> Iterator[nn.Module]:
    with anatomy.fake_model(model, device) as fake:
        if not fake.training:
            fake.train()
        yield fake


@contextlib.contextmanager
def _autocast(kind: str, half: torch.dtype | None) -> Iterator[None]:
    """`torch.autocast`, which on a machine without a GPU would refuse to be switched on for one."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, half is not None)
    torch.set_autocast_dtype(kind, half or before[1])
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


class _GpuAttention(TorchFunctionMode):
    """Attention as a GPU has it; where there is none, torch would choose the plain kind, which keeps the whole map."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            tensors = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
            # No kernel takes more dimensions, and this one no fewer heads of keys: these stay with torch's choice.
            if all(t.ndim == 4 and t.device.type == "cuda" for t in tensors) and not kwargs.get("enable_gqa"):
                return _efficient_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    query, key, value = (t.to(dtype) for t in (query, key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.to(dtype).expand(*query.shape[:-1], key.shape[-2])
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
