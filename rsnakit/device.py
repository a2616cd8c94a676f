"""The device to compute on and the precision to compute in, each with the reason for it. torch is imported when asked."""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """A value that was asked for or chosen, and why in a sentence."""

    value: str
    reason: str


def choose_device(wanted: str = "auto") -> Choice:
    """The device to compute on: with "auto" a GPU that really computes, else Apple's MPS, else the CPU.

    A device is tried with a small matrix product, since `torch.cuda.is_available()` also says True for a GPU that the
    installed torch has no kernels for, as on a P100.

    Raises:
        ValueError: `wanted` is none of auto, cpu, cuda, cuda:N, mps.
        RuntimeError: the device asked for doesn't work; the message says why.
    """
    import torch

    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", wanted):
        raise ValueError(f"device {wanted!r}: expected auto, cpu, cuda, cuda:N or mps")
    if wanted == "cpu":
        return Choice("cpu", "asked for")
    if wanted != "auto":
        problem = _device_problem(torch, wanted)
        if problem:
            raise RuntimeError(f"device {wanted} was asked for, but {problem}; use device auto or cpu")
        return Choice(wanted, f"asked for: {_device_name(torch, wanted)}")
    problems = []
    for device in ("cuda", "mps"):
        problem = _device_problem(torch, device)
        if problem is None:
            return Choice(device, f"{_device_name(torch, device)} works")
        problems.append(problem)
    return Choice("cpu", " and ".join(problems))


def choose_precision(device: Any, wanted: str = "auto") -> Choice:
    """The precision of forward and loss: fp32, bf16, or fp16, which needs a gradient scaler.

    With "auto": bf16 on GPUs from Ampere on (capability 8.0), fp16 on Volta and Turing (7.0, 7.5), fp32 on older ones,
    which have no tensor cores, and on the CPU and MPS.

    Args:
        device: a device name or torch.device, as `choose_device` gives it.
        wanted: auto, fp32, bf16 or fp16.

    Raises:
        ValueError: `wanted` is unknown, or the device can't do it; the message says what it can do.
    """
    import torch

    device = torch.device(device)
    if wanted not in ("auto", "fp32", "bf16", "fp16"):
        raise ValueError(f"precision {wanted!r}: expected auto, fp32, bf16 or fp16")
    problems = _precision_problems(torch, device)
    able = [name for name in ("bf16", "fp16") if name not in problems]
    if wanted in problems:
        raise ValueError(f"precision {wanted} was asked for, but {problems[wanted]}; use {(*able, 'fp32')[0]}, or auto")
    if wanted != "auto":
        return Choice(wanted, "asked for")
    if device.type == "cpu":
        return Choice("fp32", "mixed precision gains little on a CPU")
    if not able:
        return Choice("fp32", problems["fp16"])
    scaling = "no gradient scaling needed" if able[0] == "bf16" else f"gradients are scaled, as {problems['bf16']}"
    return Choice(able[0], f"{_device_name(torch, device)} has tensor cores for it; {scaling}")


def _device_problem(torch: Any, device: str) -> str | None:
    """Why a device can't compute, or None if it can."""
    if device == "mps" and not torch.backends.mps.is_available():
        return "there is no Apple GPU (MPS)"
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA GPU"
        count, index = torch.cuda.device_count(), int(device.partition(":")[2] or 0)
        if index >= count:
            return f"there are only {count} CUDA GPUs, counted from 0"
    try:
        x = torch.ones(16, 16, device=device)
        if float((x @ x).sum()) != 16**3:
            return f"{_device_name(torch, device)} gives a wrong matrix product"
    except Exception as error:  # whatever a driver or a missing kernel raises
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{_device_name(torch, device)} cannot run torch {torch.__version__} ({cause})"
    return None


def _precision_problems(torch: Any, device: Any) -> dict[str, str]:
    """Why the device can't compute in bf16 or fp16, by precision; one that it can is missing."""
    if device.type == "cpu":
        return {"fp16": "a CPU is slow in fp16 and loses small gradients"}
    if device.type != "cuda":
        return dict.fromkeys(("bf16", "fp16"), f"mixed precision has not been tried out on {device.type}")
    capability, name = torch.cuda.get_device_capability(device), _device_name(torch, device)
    if capability < (7, 0):
        return dict.fromkeys(("bf16", "fp16"), f"{name} has no tensor cores, which came with 7.0")
    if capability < (8, 0) or not torch.cuda.is_bf16_supported(including_emulation=False):
        return {"bf16": f"{name} only emulates bf16, which came with 8.0"}
    return {}


def _device_name(torch: Any, device: Any) -> str:
    if not str(device).startswith("cuda"):
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (capability {major}.{minor})"
