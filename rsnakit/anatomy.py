"""What a model is made of: torchinfo's table of its modules, and a count of the basic parts they come apart into.

The model is never run. A copy of it, whose weights are fake tensors (shapes without values), runs in its place, so that
no memory is taken, nothing is computed, and nothing that happens can leave a trace in the model or the random numbers.
"""

import collections
import contextlib
import copy
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

import pandas as pd
import torch
import torchinfo
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter
from torchinfo import ColumnSettings, RowSettings

from rsnakit.patching import inner_module, plain_name

Size = Sequence[int] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """A model's table and its parts; printing it shows both.

    Attributes:
        table: torchinfo's ModelStatistics. Its `summary_list` refers to the copy that ran, which has no weights. Its
            total of multiply-adds is counted as `cost.estimate` does (so without a fused LSTM's), of the whole input. A
            column "mult_adds" is its own: it leaves out attention, and counts a linear layer once a sample, not a token.
        parts: DataFrame with a row a kind of part. `count`: modules of this kind, or calls of a function; `parameters`:
            those that the modules hold themselves, so that the column's sum is the model's (tied weights count where
            they come first); `share_%`: of all parameters; `calls`: how often the pass called these modules (0: it
            does not reach them, or their owner uses their weights without calling them); `example`: a module's name.
    """

    table: torchinfo.ModelStatistics
    parts: pd.DataFrame

    def __repr__(self) -> str:
        # torchinfo's units are an enum, which Python shows by its member's name since 3.11.
        table = re.sub(r"Units\.(\w)\w+", r"\1", str(self.table))
        return f"{table}\n\n{self.parts.to_string(index=False, formatters={'parameters': '{:,}'.format})}"


def summarize(
    model: nn.Module,
    input_size: Size,
    depth: int = 3,
    col_names: Sequence[str] = ("input_size", "output_size", "num_params", "trainable"),
    col_width: int = 18,
    row_settings: Sequence[str] = ("var_names",),
) -> Summary:
    """The table of a model's modules, and a count of its basic parts. The model is left as it was, flags and all.

    Modules without children are basic parts: convolutions (by kernel, stride, groups and dilation), linear layers, norms,
    activations, pooling, resampling, dropout, embeddings, identities. Attention and channel gates (squeeze and excite) are
    counted beside the parts that they are made of. What else holds parameters itself (a layer scale, a position embedding)
    is `other`. Functions that a forward calls outside of basic parts (`F.relu`, `torch.cat`) are counted as `function`;
    arithmetic signs and reshaping are not.

    Args:
        model: any module that takes tensors of its own dtype. It's shown as it works in evaluation.
        input_size: (C, H, W) of an image, or with a batch (B, C, H, W); a breast is (B, V, 1, H, W). Several sizes are
            several inputs, each with its batch: [(1, 3, 64, 64), (1, 10)].
        depth, col_names, col_width, row_settings: as `torchinfo.summary` has them. With "var_names" each module has its
            full name, which `surgery.capture` takes; "depth" adds torchinfo's index.

    Raises:
        ValueError: the model fails on such an input (what it wants is said), or torchinfo has no such column or setting.
    """
    for given, known in ((col_names, ColumnSettings), (row_settings, RowSettings)):
        if unknown := set(given) - {setting.value for setting in known}:
            raise ValueError(f"torchinfo has no {', '.join(unknown)}; there are {', '.join(s.value for s in known)}")
    for setting, value, least in (("depth", depth, 0), ("col_width", col_width, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{setting} is {value!r}; expected a whole number from {least}")
    functions, counter = _Functions(), mult_adds_counter()
    with fake_model(model) as fake:
        for module in fake.modules():
            if _is_basic(module):
                module.register_forward_pre_hook(functions.enter, prepend=True)
                module.register_forward_hook(functions.leave)
        inputs = [fake_input(fake, size) for size in _sizes(input_size)]
        try:
            with counter, functions:
                table = torchinfo.summary(
                    fake,
                    input_data=inputs,
                    depth=depth,
                    col_names=tuple(col_names),
                    col_width=col_width,
                    row_settings=tuple(row_settings),
                    verbose=0,
                    **view_options(fake, inputs[0]),
                )
        except RuntimeError as error:  # of torchinfo's, which says only that the model failed
            raise refusal(model, input_size, error.__cause__ or error) from error
    names = {id(module): plain_name(name) for name, module in fake.named_modules()}
    calls: collections.Counter[int] = collections.Counter()
    for layer in table.summary_list:
        layer.var_name = names[id(layer.module)]
        calls[id(layer.module)] += layer.executed
    # Again, now for the full names, and for those rows alone that are shown.
    table.formatting.layer_name_width = 40
    table.formatting.set_layer_name_width([layer for layer in table.summary_list if layer.depth <= depth])
    table.total_mult_adds = counter.get_total_flops() // 2
    return Summary(table, _count_parts(fake, calls, functions.calls))


@contextlib.contextmanager
def fake_model(model: nn.Module, device: torch.device | str | None = None) -> Iterator[nn.Module]:
    """A copy of the model for the length of a with block: its weights have shapes and types, but no values and no memory.

    Within the block all tensors that are made are such, on any device, whether or not this machine has it.

    Args:
        device: which the copy's weights say they are on; None: each where it is.
    """
    model = inner_module(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, torch.Tensor] = {}  # what deepcopy takes in place of these, by identity: tied weights stay tied
    with mode:
        for tensor in (*model.parameters(), *model.buffers()):
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
            )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
    fake_copy = copy.deepcopy(model, memo)
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # what is compiled inside the model runs uncompiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mode)
        yield fake_copy


def mult_adds_counter() -> flop_counter.FlopCounterMode:
    """torch's counter of floating point operations, two a multiply-add: convolutions, matrix products and attention."""
    # The CPU's flash attention is not among what it knows.
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    more = {attention: lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v)}
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=more)
    # The total is enough; what follows modules needs gradients, and hooks into all modules there are.
    counter.mod_tracker = contextlib.nullcontext()
    counter.mod_tracker.parents = {"Global"}
    return counter


def view_options(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a model of breasts is given beside the images (B, V, 1, H, W): which view each is."""
    if x.ndim == 5 and "view_id" in inspect.signature(model.forward).parameters:
        return {
            "view_id": torch.zeros(x.shape[:2], dtype=torch.int64, device="meta")
        }  # there nobody asks for its values
    return {}


def fake_input(model: nn.Module, size: Sequence[int]) -> torch.Tensor:
    """A tensor of a size, in the type and on the device of the model's first weight; without memory, in `fake_model`."""
    if not size or not all(isinstance(n, int) and n > 0 for n in size):
        raise ValueError(f"input size {size!r}: expected whole numbers from 1, such as (3, 224, 224)")
    weight = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.empty(0))
    return torch.empty(tuple(size), dtype=weight.dtype, device=weight.device)


def refusal(model: nn.Module, input_size: Size, error: BaseException) -> ValueError:
    """An error that says which model failed on which input, why, and what input it wants."""
    model = inner_module(model)
    settings = next((m.pretrained_cfg for m in model.modules() if hasattr(m, "pretrained_cfg")), None) or {}
    reason = f"{type(error).__name__}: {str(error).strip().rstrip('.') or 'no reason given'}"
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        reason += ". Its forward asks for values, and here it runs on shapes alone"
    if settings.get("input_size"):
        fixed = ", a size that timm calls fixed" if settings.get("fixed_input_size") else ""
        reason += f". Its weights were made for {tuple(settings['input_size'])}{fixed}"
    name = type(model).__name__
    if settings.get("architecture"):
        name += f" ({settings['architecture']})"
    return ValueError(f"{name} fails on an input of {input_size}. {reason}.")


def _sizes(input_size: Size) -> list[Sequence[int]]:
    """One size an input; an image gets a batch."""
    size = tuple(input_size) if isinstance(input_size, Iterable) else (input_size,)
    if any(isinstance(n, Sequence) for n in size):
        return list(size)
    return [(1, *size) if len(size) == 3 else size]


# By class name, as timm's are called; attention has qkv, too.
ATTENTION = re.compile(r"Attention|Attn|^(XCA|GPSA|MHSA|SHSA|SHMA)$|MLA$")
GATE = re.compile(
    r"^(sc)?SE(Module|Layer)?$|(?i:scse)|SqueezeExc|[a-z]SE|BlockESE|^C?Eca|Cbam|GatherExc|^GlobalContext$|^S\w+Attn$"
)
# Of what has no children: the first that fits, by class name.
LEAVES = {
    "linear": re.compile(r"Linear$"),
    "norm": re.compile(r"Norm|^GRN|^Affine"),
    "activation": re.compile(r"(?i)relu|[gsc]elu|^elu|glu$|silu|swish|mish|sigmoid|tanh|softm|softplus"),
    "pooling": re.compile(r"Pool|^GeM"),
    "resampling": re.compile(r"(?i)upsampl|downsampl|shuffle|spacetodepth|depthtospace|interpolat|^(un)?fold"),
    "dropout": re.compile(r"Drop"),
    "embedding": re.compile(r"Embed|Rotary"),
    "identity": re.compile(r"Identity|latten"),
}
ORDER = [
    *("convolution", "linear", "recurrent", "norm", "activation", "attention", "gate"),
    *("pooling", "resampling", "dropout", "embedding", "identity", "other", "function"),
]
COMPOSED = ("attention", "gate", "other")  # of further modules, or what the forward does there is its own
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# What is counted of the functions that a forward calls, by name; __matmul__ and relu_ are matmul and relu.
FUNCTIONS = re.compile(
    r"conv(_transpose)?[123]d|linear|matmul|bmm|baddbmm|einsum|scaled_dot_product_attention|multi_head_attention_forward|"
    r"(log_)?softmax|(hard)?sigmoid|relu6?|[gs]elu|silu|(hard)?swish|mish|tanh|softplus|(layer|group|batch|rms)_norm|normalize|"
    r"cat|stack|interpolate|grid_sample|pad|roll|(adaptive_)?(max|avg)_pool[123]d|mean|amax|max|sum|topk|dropout|"
    r"pixel_(un)?shuffle|(un)?fold|i?r?fft2|gather|index_select"
)


class _Functions(TorchFunctionMode):
    """Counts the calls of torch's functions outside of basic parts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.inside = 0

    def enter(self, *_: object) -> None:
        self.inside += 1

    def leave(self, *_: object) -> None:
        self.inside -= 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "").strip("_")
        if not self.inside and FUNCTIONS.fullmatch(name):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def _count_parts(
    model: nn.Module, calls: collections.Counter[int], functions: collections.Counter[str]
) -> pd.DataFrame:
    rows: dict[tuple[str, str], dict] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        key = _part_of(module)
        if key is None:
            continue
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        row = rows.setdefault(
            key, {"count": 0, "parameters": 0, "calls": 0, "example": plain_name(name) or "(the model)"}
        )
        row["count"] += 1
        row["parameters"] += sum(p.numel() for p in own)
        row["calls"] += calls[id(module)]
    for name, count in functions.items():
        rows["function", name] = {"count": count, "parameters": 0, "calls": count, "example": ""}
    ordered = sorted(rows, key=lambda k: (ORDER.index(k[0]), -rows[k]["parameters"], -rows[k]["count"], k[1]))
    columns = ["part", "kind", "count", "parameters", "share_%", "calls", "example"]
    table = pd.DataFrame([{"part": key[0], "kind": key[1], **rows[key]} for key in ordered], columns=columns)
    table["share_%"] = (100 * table["parameters"] / max(1, table["parameters"].sum())).round(1)
    return table


def _is_basic(module: nn.Module) -> bool:
    part = _part_of(module)
    return part is not None and (part[0] not in COMPOSED or not any(module.children()))


def _part_of(module: nn.Module) -> tuple[str, str] | None:
    """The part and kind that a module is, or None for one that only holds others."""
    name = type(module).__name__
    own = [key for key, parameter in module.named_parameters(recurse=False)]
    leaf = not any(True for _ in module.children())
    if isinstance(getattr(module, "kernel_size", None), tuple | int) and "weight" in own:
        return ("resampling" if getattr(module, "transposed", False) else "convolution"), _convolution_kind(module)
    if isinstance(module, nn.RNNBase):
        return "recurrent", name
    for part, fits in (("gate", _is_gate), ("attention", _is_attention)):
        if fits(module) and not any(fits(inner) for inner in module.modules() if inner is not module):
            return part, name
    if leaf and not own and isinstance(module, CONTAINERS):
        return None
    for part, pattern in LEAVES.items():
        # A norm of timm's may hold its activation, an activation another.
        if pattern.search(name) and (leaf or (own and part in ("norm", "activation"))):
            return part, name
    if own:
        return "other", f"{name}: {', '.join(own)}"
    return ("other", name) if leaf else None


def _is_gate(module: nn.Module) -> bool:
    return bool(GATE.search(type(module).__name__))


def _is_attention(module: nn.Module) -> bool:
    return bool(ATTENTION.search(type(module).__name__)) or hasattr(module, "qkv") or hasattr(module, "fused_attn")


def _convolution_kind(module: nn.Module) -> str:
    """Such as `3x3 stride 2 depthwise dilation 2`."""
    size, stride, dilation = (
        "x".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
        for value in (module.kernel_size, module.stride, getattr(module, "dilation", 1))
    )
    words = [size]
    ones = ("1", "1x1", "1x1x1")
    for word, value in (("stride", stride), ("dilation", dilation)):
        if value not in ones:
            words.append(f"{word} {value}")
    groups = getattr(module, "groups", 1)
    if groups > 1:
        words.append("depthwise" if groups == module.in_channels else f"{groups} groups")
    elif size in ones:
        words.append("pointwise")
    if getattr(module, "transposed", False):
        words.append("transposed")
    return " ".join(words)
