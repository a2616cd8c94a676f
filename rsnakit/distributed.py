"""Several processors: one process each, started by torchrun, that train one model together.

In such a process (a rank, of `world()` many): `end_with_parent`, `join`, then `wrap`, `gather` and the others, at last
`leave`. Each of them is also right in an only process, so that the same code trains on one processor. A notebook starts
the ranks by `launch`; on several machines the line that `command` gives does.

Plain values go from rank to rank through the CPU (gloo): on GPUs the sum of gradients, DistributedDataParallel's own, is
the only thing that a step waits for.
"""

import contextlib
import datetime
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rsnakit.device import choose_device
from rsnakit.launching import by_torchrun, command, end_with_parent, launch

__all__ = [
    "any_rank", "batches_a_step", "broadcast_buffers", "command", "end_with_parent", "gather", "is_main", "join", "launch",
    "leave", "no_sync", "processes", "rank", "world", "wrap",
]  # fmt: skip

# A rank that died is seen at once, by torchrun; this is for one that hangs, or a machine that is lost.
TIMEOUT = datetime.timedelta(minutes=30)


def world() -> int:
    """How many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is the process that writes."""
    return rank() == 0


def gather(value: Any) -> list:
    """The value that each process gives, in their order, on every process; of plain values and NumPy arrays, which may
    differ in shape. All wait for one another."""
    values: list = [value]
    if world() > 1:
        values *= world()
        dist.all_gather_object(values, value)
    return values


def any_rank(flag: bool) -> bool:
    """Whether any process says so. All wait for one another."""
    if world() == 1:
        return bool(flag)
    count = torch.tensor(int(flag))
    dist.all_reduce(count)
    return bool(count > 0)


def broadcast_buffers(module: nn.Module) -> None:
    """Gives all processes the buffers that the first one has, such as the running statistics of its BatchNorms."""
    buffers = list(module.buffers())
    if world() == 1 or not buffers:
        return
    values = [[buffer.detach().cpu() for buffer in buffers] if is_main() else None]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    with torch.no_grad():
        for buffer, value in zip(buffers, values[0], strict=True):
            buffer.copy_(value)


def wrap(model: nn.Module, sync_batchnorm: bool, device: str) -> nn.Module:
    """The model as several processes train it: in DistributedDataParallel; in an only process as it is.

    All begin with the first one's weights and buffers. Inputs are not moved, and buffers stay each process's own until
    `broadcast_buffers`. A parameter that a pass does not use is left alone, as it is in one process.

    Args:
        model: on its device; `.module` of what is returned.
        sync_batchnorm: take the statistics of BatchNorms over all processes' batches. Its layers become SyncBatchNorm in
            place, with the same names, parameters and buffers.

    Raises:
        ValueError: `sync_batchnorm` on a CPU, or for a BatchNorm whose forward was replaced.
    """
    if world() == 1:
        return model
    if sync_batchnorm:
        if not device.startswith("cuda"):
            raise ValueError(
                f"sync_batchnorm: torch has SyncBatchNorm for GPUs only, and this is {device}; turn it off"
            )
        model = _with_sync_batchnorm(model)
    broadcast_buffers(model)  # DistributedDataParallel does it only where it does so at each pass
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.14 has another name for the first
        return DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=True
        )


def _with_sync_batchnorm(model: nn.Module) -> nn.Module:
    from timm.layers import convert_sync_batchnorm  # torch's own loses the activation in timm's BatchNormAct2d

    norms = (nn.modules.batchnorm._BatchNorm,)
    for name, module in model.named_modules():
        if isinstance(module, norms) and (
            "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
        ):
            raise ValueError(
                f"sync_batchnorm: {name} has a hook or a forward of its own, which a SyncBatchNorm in its place would not"
            )
    return convert_sync_batchnorm(model)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager:
    """A context in which backward keeps its gradients to itself: for all batches of a step but the last."""
    inner = getattr(model, "_orig_mod", model)
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) else contextlib.nullcontext()


def processes(wanted: int, device: str) -> int:
    """The number of processes that train.

    Args:
        wanted: 0: as many as there are GPUs, and 1 on another device or where one GPU was chosen (`cuda:1`).
        device: auto, cpu, mps, cuda or cuda:N.

    Raises:
        ValueError: more than there are GPUs, several on one device that is no CPU, or less than 0.
    """
    if wanted < 0:
        raise ValueError(f"n_procs: got {wanted}, expected 0 or more")
    if device == "auto":
        device = choose_device("auto").value
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    if device != "cpu" and wanted > gpus:
        there = f"there are {gpus} GPUs" if device == "cuda" else f"{device} is one device"
        raise ValueError(f"n_procs: got {wanted}, but {there}; take 0, for as many as there are")
    return wanted or max(1, gpus)


def batches_a_step(accumulate: int, n_procs: int) -> int:
    """The batches of an optimiser step on all processes together; `accumulate=0` is one on each.

    Raises:
        ValueError: they cannot be shared evenly.
    """
    if accumulate % n_procs:
        low = accumulate // n_procs * n_procs
        near = f"{low} or {low + n_procs}" if low else str(n_procs)
        raise ValueError(
            f"accumulate: {accumulate} batches a step cannot be shared evenly by {n_procs} processes; take {near}, or 0, which "
            "is one on each, or another n_procs"
        )
    return accumulate or n_procs


def join(device: str) -> str:
    """Makes this process one of those that torchrun started; without torchrun it is the only one.

    Args:
        device: auto, cpu, cuda or cuda:N, the same in all.

    Returns:
        The device of this process: of several GPUs, the one with its number on this machine.

    Raises:
        ValueError: processes have devices of several kinds, or there are several on one that is no CPU.
        RuntimeError: the device does not work.
    """
    if not by_torchrun():
        return device
    here, number = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if device == "auto":
        try:  # not as a notebook tries it: that would take memory of the first GPU in all processes
            device = choose_device(f"cuda:{number}").value
        except RuntimeError:
            device = "cpu"
    elif device not in ("cpu", "cuda") and here > 1:
        raise ValueError(f"{here} processes on this machine, but {device} is one device: take device auto, cuda or cpu")
    else:
        device = choose_device(f"cuda:{number}" if device == "cuda" else device).value
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    kinds = {value.partition(":")[0] for value in gather(device)}
    if len(kinds) > 1:
        raise ValueError(f"the processes have devices of several kinds, {' and '.join(sorted(kinds))}: name one")
    return device


def leave() -> None:
    """Ends what `join` began, where all went well; a process that failed just ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
