"""Memory of devices: of GPUs and containers as they say it, of this process as it is."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rsnakit import device_memory


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is resident")
def test_the_most_memory_is_told_though_it_was_let_go_of():
    memory = device_memory.Memory("cpu")
    held = np.ones(50_000_000, np.uint8)
    del held
    assert 45 <= memory.peak_mb() < 80


def test_memory_of_captured_graphs_cannot_be_told(monkeypatch):
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: 3e6 if name.startswith("max") else 1e6)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    found = [device_memory.Memory("cuda:1", mode).peak_mb() for mode in ("off", "default", "max-autotune")]
    assert found[:2] == [2, 2] and math.isnan(found[2])


def test_memory_of_a_gpu_is_limited_by_its_share(monkeypatch):
    """2 GB beside the 1 GB that is taken, of 12."""
    shares, properties = [], SimpleNamespace(total_memory=12e9)
    for name, value in (
        ("empty_cache", lambda: None), ("current_device", lambda: 3), ("get_device_properties", lambda index: properties),
        ("memory_reserved", lambda index: 1e9),
        ("set_per_process_memory_fraction", lambda share, index: shares.append((share, index))),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    with device_memory.limited("cuda", 2.0), device_memory.limited("cuda:1", 20.0):
        assert shares == [(0.25, 3), (1.0, 1)]
    assert shares[2:] == [(1.0, 1), (1.0, 3)]


def test_memory_of_a_container(tmp_path):
    """What its control group allows, less what is taken, but for files that can be let go."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert device_memory.available(tmp_path) > 1e8  # the machine's
    (group / "memory.max").write_text("50000\n")
    (group / "memory.stat").write_text("anon 600\ninactive_file 300\nactive_file 100\n")
    assert device_memory.available(tmp_path) == 50000 - 1000 + 300
    for name in ("memory.max", "memory.current", "memory.stat"):
        (group / name).unlink()
    (group / "memory").mkdir()
    for name, text in (
        ("limit_in_bytes", "9223372036854771712"), ("usage_in_bytes", "7000"), ("stat", "total_inactive_file 2000\n")
    ):  # fmt: skip
        (group / "memory" / f"memory.{name}").write_text(text)
    assert device_memory.available(tmp_path) > 1e8
    (group / "memory/memory.limit_in_bytes").write_text("9000")
    assert device_memory.available(tmp_path) == 9000 - 7000 + 2000
