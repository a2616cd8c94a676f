"""Errors of memory, provoked where that is possible, and what is said of them."""

import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import weakref
from pathlib import Path

import cv2
import numpy as np
import pytest
import small_shm
import torch
from torch.utils.data import DataLoader, Dataset

from rsnakit.failures import OutOfMemory, explained

SAFE = "fold0/last.pt, from which the same command goes on"
REPOSITORY = Path(__file__).parents[1]
TOO_MUCH = 10**15  # bytes


def refused(call) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught, explained(SAFE):
        call()
    return caught.value


class Fails(Dataset):
    """Eight images, the fourth of which ends in a disaster."""

    def __init__(self, disaster):
        self.disaster = disaster

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 3:
            self.disaster()
        return torch.zeros(4)


def die(how):
    time.sleep(0.3)  # by then the loop has fetched the images before, and waits
    os.kill(os.getpid(), how)


def load(disaster, *arguments):
    def run():
        for _ in DataLoader(Fails(lambda: disaster(*arguments)), 1, num_workers=1):
            pass

    return run


def allocate_torch():
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def allocate_numpy():
    np.empty(TOO_MUCH, np.uint8)


def allocate_cv2():
    cv2.resize(np.zeros((4, 4), np.uint8), (30_000_000, 30_000_000))


# ---- provoked


@pytest.mark.parametrize("allocate", [allocate_torch, allocate_numpy, allocate_cv2])
@pytest.mark.parametrize("in_worker", [False, True])
def test_the_main_memory_is_used_up(allocate, in_worker):
    error = refused(load(allocate) if in_worker else allocate)
    message = str(error)
    for part in ("the main memory is used up", "num_workers", "grad_checkpointing=true", "batch_size", "accumulate"):
        assert part in message
    assert message.endswith(f"Safe is {SAFE}.") and "\n" not in message and "Traceback" not in message
    assert error.__cause__ is not None and isinstance(error, RuntimeError)
    assert "llocate" in message  # the library's own words, with the size


def test_a_worker_is_killed():
    """As the system does when the memory is used up."""
    error = refused(load(die, signal.SIGKILL))
    assert (
        "ended without a word" in str(error) and "num_workers" in str(error) and str(error).endswith(f"Safe is {SAFE}.")
    )
    assert "DataLoader worker" in str(error.__cause__)
    assert "batch_size" not in str(error)  # it changes the run, and would not help


@pytest.mark.parametrize("broken", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
@pytest.mark.parametrize(("how", "kind"), [("Killed. ", OutOfMemory), ("Segmentation fault. ", RuntimeError)])
def test_a_worker_dies_while_it_hands_over_a_batch(broken, how, kind):
    """Then all that reaches the loop at first is a broken connection, and the signal, whose handler raises, comes after it."""

    def handler(*_):
        raise RuntimeError(f"DataLoader worker (pid 12) is killed by signal: {how}")

    def fail():
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        raise broken

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(RuntimeError, match=how.strip()) as caught, explained(SAFE):
            fail()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert type(caught.value) is kind
    with pytest.raises(type(broken)) as caught, explained(SAFE):  # of which no signal tells more
        raise broken
    assert caught.value is broken


def test_a_worker_dies_of_a_bus_error():  # A03
    error = refused(load(die, signal.SIGBUS))
    for part in ("shared memory /dev/shm", "num_workers", "--shm-size"):
        assert part in str(error)
    assert str(error).endswith(f"Safe is {SAFE}.") and "DataLoader worker" in str(error.__cause__)


def test_too_many_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = []  # each batch of a worker's is an open file

    def load_all():
        for batch in DataLoader([torch.zeros(4)] * 100, 1, num_workers=1):
            kept.append(batch)

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 25, hard))
        error = refused(load_all)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (
        "too many files are open" in str(error)
        and "ulimit -n" in str(error)
        and str(error).endswith(f"Safe is {SAFE}.")
    )


SCRIPT = """
import torch
from torch.utils.data import DataLoader
from rsnakit.failures import explained
with explained("SAFE"):
    kept = list(DataLoader([torch.zeros(500_000)] * 40, 1, num_workers=1))
"""


def test_shared_memory_is_small():  # A03
    """A /dev/shm of 4 MB, where the system lets us have one of our own."""
    command = small_shm.command_in("4m", sys.executable, "-c", SCRIPT)
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert "OutOfMemory: the shared memory /dev/shm is used up" in result.stderr and "SAFE" in result.stderr


# ---- in the words of those that cannot be had here


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"), "the GPU's memory"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "the GPU's memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "the GPU's memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "the GPU's memory"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 5 GB, other"), "the GPU's memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: not enough memory: you"), "main memory"),
        (RuntimeError("std::bad_alloc"), "main memory"),
        (MemoryError(), "main memory"),
        (OSError(12, "Cannot allocate memory"), "main memory"),
        (RuntimeError("unable to open shared memory object </torch_12_3456> in read-write mode: x"), "shared memory"),
        (RuntimeError("unable to mmap 1024 bytes from file </torch_1_2_3>: Cannot allocate memory (12)"), "shared memory"),
        (RuntimeError("unable to write to file </torch_18692_1954506624>"), "shared memory"),
        (OSError(28, "No space left on device", "/dev/shm/pym-12-ab"), "shared memory"),
        (RuntimeError("unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)"),
         "shared memory"),
        (RuntimeError("received 0 items of ancdata"), "too many files"),
        (OSError(24, "Too many open files", "/data/store/images.bin"), "too many files"),
        (RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly"), "without a word"),
    ],
)  # fmt: skip
def test_known_words(error, part):
    def fail():
        raise error

    found = refused(fail)
    assert part in str(found) and str(found).endswith(f"Safe is {SAFE}.") and found.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "/home/me/torch_12/runs/last.pt"),  # a full disk is another matter
        OSError(5, "Input/output error"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x512 and 256x1)"),
        RuntimeError("DataLoader worker (pid 12) exited unexpectedly with exit code 1. Details are lost due to"),
        FloatingPointError("the loss is nan in batch 3"),
        ValueError("batch_size: out of memory of what was meant"),
        KeyError("memory"),
        torch.cuda.CudaError(700)
        if hasattr(torch.cuda, "CudaError") and torch.cuda.is_available()
        else RuntimeError("x"),
    ],
)
def test_other_errors_pass_untouched(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught, explained(SAFE):
        fail()
    assert caught.value is error and error.__cause__ is None


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGTERM])
def test_a_worker_that_crashes_or_is_sent_away_is_no_matter_of_memory(how):
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught, explained(SAFE):
        load(die, how)()
    assert not isinstance(caught.value, OutOfMemory)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_end_that_was_asked_for_passes(error):
    with pytest.raises(error), explained(SAFE):
        raise error


def test_it_is_explained_once():
    with pytest.raises(OutOfMemory) as caught, explained("outer"), explained("inner"):
        allocate_torch()
    assert str(caught.value).endswith("inner.") and "outer" not in str(caught.value)


def test_what_is_safe_may_be_asked_when_it_failed():
    epochs = []
    with pytest.raises(OutOfMemory, match=r"Safe is epoch 2\.$"), explained(lambda: f"epoch {len(epochs)}"):
        epochs += [1, 2]
        allocate_torch()


def test_what_the_failed_step_held_is_let_go():
    """A notebook keeps the last error, and with it all that its frames hold: a second try would find the memory taken."""
    held = []

    def step():
        big = torch.zeros(1000)
        held.append(weakref.ref(big))
        allocate_torch()

    error = refused(step)
    assert held[0]() is None
    assert "allocate_torch" in "".join(traceback.format_exception(error))  # where it happened is still told


def test_nothing_changes_where_nothing_fails():
    with explained(SAFE):
        value = 3
    assert value == 3


def test_a_limit_on_memory_gives_the_same_words():
    """RLIMIT_AS, as batch systems set it; where the size itself would be possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, hard))
        error = refused(lambda: torch.empty(2**30, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "the main memory is used up" in str(error)
