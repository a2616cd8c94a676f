"""The device to compute on, the precision to compute in and whether to compile, each with the reason for it.

torch is imported when asked.
"""

import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
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


def choose_compile(device: Any, wanted: str = "off") -> Choice:
    """Whether to compile the model: what was asked for, or `off` where it would not work.

    Before it says yes, a function of one line is compiled and run there, which takes seconds; with "off" nothing is tried.

    Args:
        device: a device name or torch.device, as `choose_device` gives it.
        wanted: off, default or max-autotune, the modes of `torch.compile`.

    Raises:
        ValueError: `wanted` is unknown.
    """
    import torch

    if wanted not in ("off", "default", "max-autotune"):
        raise ValueError(f"compile {wanted!r}: expected off, default or max-autotune")
    if wanted == "off":
        return Choice("off", "asked for")
    device = torch.device(device)
    problem = _tools_problem(torch, device) or _compile_problem(torch, device)
    if problem:
        return Choice("off", f"{wanted} was asked for, but {problem}")
    return Choice(wanted, f"asked for, and {_device_name(torch, device)} runs what torch {torch.__version__} compiles")


def synchronize(device: Any) -> None:
    """Waits until a device, given by its name or as a torch.device, has done what it was told to."""
    import torch

    device = torch.device(device)
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def check_gpu(root: Path = Path("/")) -> None:
    """Refuses Kaggle's machine where torch cannot compute on its GPU, and prints a NOTE where it has none.

    Kaggle's torch has no kernels for a P100, which is what a notebook gets that only asks for a GPU. A GPU that is hidden
    by $CUDA_VISIBLE_DEVICES is none.

    Raises:
        RuntimeError: with what to choose instead.
    """
    try:
        import torch
    except ImportError:
        return
    choice = choose_device()
    if choice.value != "cpu":
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    signs = (root.glob("dev/nvidia[0-9]*"), root.glob("proc/driver/nvidia/gpus/*"))
    if torch.cuda.is_available() or (not hidden and any(map(any, signs))):
        raise RuntimeError(
            f"this machine's GPU cannot be used: {choice.reason}. Choose the accelerator GPU T4 x2 in the notebook's settings "
            "(Session options), or none to compute on the CPU, and run it again."
        )
    print("NOTE: no GPU: for the whole test set choose the accelerator GPU T4 x2 in the notebook's settings")


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


def _tools_problem(torch: Any, device: Any) -> str | None:
    """What compiling needs on the device and is not there, or None."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (7, 0):
            return f"{_device_name(torch, device)} is too old: Triton, which compiles for it, needs 7.0"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed, which compiles for GPUs"
    elif device.type == "cpu":
        compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        if shutil.which(compiler) is None:
            return f"there is no C++ compiler {compiler}: install one, or name one with $CXX"
    else:
        return f"compiling has not been tried out on {device.type}"
    return None


def _compile_problem(torch: Any, device: Any) -> str | None:
    """Why a function of one line does not compile and run on the device, or None if it does."""
    try:
        x = torch.arange(8.0, device=device)
        if float(torch.compile(lambda x: x * 2 + 1)(x).sum()) != 64:
            return f"{_device_name(torch, device)} gives a wrong result with it"
    except Exception as error:  # whatever a compiler, a driver or a missing header raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        causes = [line for line in lines[1:] if "error: " in line]  # of a compiler's many lines the one that tells
        return f"a first try failed ({'; '.join(lines[:1] + causes[:1])})"
    return None


def _device_name(torch: Any, device: Any) -> str:
    if not str(device).startswith("cuda"):
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (capability {major}.{minor})"
