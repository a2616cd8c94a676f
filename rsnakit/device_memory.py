"""The memory of a device: how much of it is taken at most, how it runs out early, and how it is got back when it did."""

import contextlib
import gc
import math
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import psutil  # of ipykernel's
import torch

from rsnakit import failures
from rsnakit.crew import in_line
from rsnakit.device import synchronize
from rsnakit.replica import NO_ROOM

# Of the memory that is available to a CPU so much is left alone: a share, and bytes at least.
LEFT_ALONE, LEFT_BYTES = 0.1, 256 * 2**20
# What oneDNN says where it got no memory; torch's own words for it are known to `failures`.
NO_ROOM_ON_CPU = r"could not (create|execute|initialize) a (primitive|memory)|could not create a memory object"
MB = 1e6


class Memory:
    """The most memory that is taken on a device beyond what was when this was made.

    Args:
        compile: mode in which the model is compiled.
    """

    def __init__(self, device: str, compile: str = "off") -> None:
        self.device = device
        # Captured graphs keep their memory to themselves, and it is not counted while they run.
        self.hidden = compile == "max-autotune" and device_type(device) == "cuda"
        if device == "cpu":
            give_back()
            self.before = _status("VmRSS") - _status("RssFile")
        elif device.startswith("cuda"):
            self.before = torch.cuda.memory_allocated(device)
        self.restart()

    def restart(self) -> None:
        """The most is counted from here on."""
        self.known = device_type(self.device) in ("cpu", "cuda")
        if self.device == "cpu":
            try:
                Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
            except OSError:
                self.known = False
        elif self.known:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_mb(self) -> float:
        """MB; NaN where it cannot be told."""
        if not self.known or self.hidden:
            return math.nan
        if self.device == "cpu":  # without pages of files, which are the libraries' code and come as they are run
            peak = _status("VmHWM") - _status("RssFile")
        else:
            peak = torch.cuda.max_memory_allocated(self.device)
        return max(0.0, peak - self.before) / MB


@contextlib.contextmanager
def limited(device: str, memory_gb: float | None) -> Iterator[None]:
    """A context in which a device's memory runs out after so many GB (10 ** 9 bytes) more.

    On the CPU it always runs out before the machine's does, so that an error is raised and nothing is killed.

    Args:
        memory_gb: None: what there is.

    Raises:
        ValueError: this system or device cannot be limited, and a limit was asked for.
    """
    kind = device_type(device)
    if kind == "cuda" and memory_gb is not None:
        index = torch.device(device).index
        index = torch.cuda.current_device() if index is None else index  # torch takes no "cuda" without a number here
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(index).total_memory
        share = (torch.cuda.memory_reserved(index) + memory_gb * 1e9) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
    elif kind == "cpu" and not math.isnan(taken := _status("VmData")):
        import resource

        there = available()
        room = min(there - max(LEFT_ALONE * there, LEFT_BYTES), math.inf if memory_gb is None else memory_gb * 1e9)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [int(taken + max(0, room)), *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    elif kind != "cuda" and memory_gb is not None:
        raise ValueError(f"memory_gb={memory_gb}: the memory of {device} cannot be limited on {sys.platform}")
    else:
        yield


def available(root: Path = Path("/")) -> float:
    """Bytes of main memory that can be had: the machine's, or what a container's control group has left (interface 2 or 1)."""
    there = psutil.virtual_memory().available
    group = root / "sys/fs/cgroup"
    for most, taken, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such interface, or "max"
            limit, used = (int((group / name).read_text()) for name in (most, taken))
            text = (group / taken).with_name("memory.stat").read_text()
            reusable = re.search(rf"^{cached} (\d+)", text, re.MULTILINE)  # of files, given back when asked for
            there = min(there, limit - used + int(reusable[1] if reusable else 0))
    return max(0, there)


def recover(error: BaseException, device: str) -> None:
    """Lets go of what the frames held in which an error came up, and gives the device's memory back.

    Raises:
        RuntimeError: the device has failed for good, as after an access to memory that is not there.
    """
    seen = set()
    while error is not None and error not in seen:
        seen.add(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    give_back(device)


def give_back(device: str = "cpu") -> None:
    """Frees memory that nothing uses any more, so that neither the next setting nor its measurement has to do with it."""
    gc.collect()
    if device.startswith("cuda"):
        if torch.cuda.is_initialized():  # else there is nothing, and asking would take some
            synchronize(device)
            torch.cuda.empty_cache()
    elif device == "cpu" and sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError, OSError):  # a C library other than GNU's
            ctypes.CDLL(None).malloc_trim(0)


def device_type(device: str) -> str:
    return device.partition(":")[0]


def lacks_room(error: BaseException) -> bool:
    """Whether an error says that memory ran out, so that a smaller batch may do."""
    return failures.what_ran_out(error) in ("GPU", "memory") or bool(
        re.search(f"{NO_ROOM}|{NO_ROOM_ON_CPU}", str(error))
    )


def in_words(error: BaseException) -> str:
    """An error in a sentence."""
    kind = failures.what_ran_out(error)
    if kind is None and lacks_room(error):
        kind = "GPU" if re.search(NO_ROOM, str(error)) else "memory"
    if kind is not None:
        return f"{failures.ADVICE[kind][0]} ({in_line(error)})"
    return " ".join(str(error).split()) if isinstance(error, ValueError | FloatingPointError) else in_line(error)


def _status(name: str) -> float:
    """Bytes of a line of /proc/self/status; NaN where there is none."""
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return math.nan
