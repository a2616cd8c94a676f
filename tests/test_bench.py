"""The measurements of tests/bench on tiny images: that they compare like with like, and tell what they measured."""

import functools
import json
import re
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pydicom
import pytest
import torch
from openers import broken, dying, zeros
from pydicom import uid

from rsnakit import augment, tables

BENCH = Path(__file__).parent / "bench"
sys.path.insert(0, str(BENCH))

import amp_time  # noqa: E402
import build_time  # noqa: E402
import checkpoint_time  # noqa: E402
import dicom_time  # noqa: E402
import infer_time  # noqa: E402
import loader_time  # noqa: E402
import loop_time  # noqa: E402
import metrics_time  # noqa: E402
import samples  # noqa: E402
import stages  # noqa: E402
import step_time  # noqa: E402
import store_time  # noqa: E402
import table  # noqa: E402
import turns  # noqa: E402
import ways  # noqa: E402

SMALL = (512, 416)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    return samples.write_made(tmp_path_factory.mktemp("made"), SMALL)


def drawn(folder: Path) -> Path:
    (path,) = samples.write_drawn(folder, 1, (640, 480))
    return path


def content(image: np.ndarray) -> np.ndarray:
    """What is left of an image without the black rows and columns around it, at 128x64 and as floats."""
    lit = image > 0.05 * image.max()
    rows, columns = np.flatnonzero(lit.any(axis=1)), np.flatnonzero(lit.any(axis=0))
    box = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return cv2.resize(box.astype(np.float32), (64, 128), interpolation=cv2.INTER_AREA)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(content(a).ravel(), content(b).ravel())[0, 1])


# The ways


@pytest.mark.parametrize(
    ("opener", "args", "package"),
    [
        (ways.open_pydicom, (), None),
        (ways.open_dicomsdl, (), "dicomsdl"),
        (ways.open_monai, ("PydicomReader",), "monai"),
        (ways.open_medip, (), "medip"),
    ],
    ids=["pydicom", "dicomsdl", "monai", "medip"],
)
def test_each_way_gives_the_picture_that_ours_gives(opener, args, package, tmp_path):
    if package:
        pytest.importorskip(package, reason="pip install -r tests/bench/requirements.txt brings it")
    path, size = drawn(tmp_path), (256, 128)
    image = opener(*args)(path, size)
    assert image.shape == size
    assert correlation(image, ways.open_rsnakit()(path, size)) > 0.95


def test_monochrome1_comes_out_turned_in_the_baseline(tmp_path):
    path = drawn(tmp_path)
    header = pydicom.dcmread(path)
    inverted = 4095 - header.pixel_array
    other = samples.dicom_files.write(tmp_path / "1.dcm", inverted, PhotometricInterpretation="MONOCHROME1")
    way = ways.open_pydicom()
    assert np.abs(way(path, (256, 128)).astype(int) - way(other, (256, 128))).max() <= 1


def test_the_baseline_runs_where_nobody_added_a_decoder(made):
    """rsnakit, imported here, added its own to pydicom's; in a process of its own it is not there."""
    others = ("gdcm", "pylibjpeg", "pillow")
    assert ways.first_decoder(made["jpeg2000"], others) == "imagecodecs"
    turn = turns.Turn(functools.partial, ways.first_decoder)
    assert turn.call(made["jpeg2000"], others, keep=True).result == "none"
    turn.close()


def test_the_first_decoder_is_the_one_that_pydicom_asks(made):
    order = [ways.first_decoder(made["jpeg2000"], without) for without in ((), ("gdcm", "pylibjpeg", "imagecodecs"))]
    assert order[0] in ("gdcm", "pylibjpeg", "pillow")
    assert order[1] == "pillow"
    assert ways.first_decoder(made["jpeg_lossless"], ("gdcm", "pylibjpeg", "imagecodecs")) == "none"


def test_crop_and_resize_takes_the_largest_bright_piece():
    image = np.zeros((100, 200), np.uint8)
    image[20:80, 50:150] = 200
    image[2:8, 180:190] = 255  # letters
    image[95, :] = 9  # under the threshold of 5 % of 255
    assert (ways.crop_and_resize(image, (30, 50)) == 200).all()


def test_eight_bits_span_smallest_to_largest():
    assert ways.to_8_bits(np.array([300, 600, 900], np.uint16)).tolist() == [0, 127, 255]


# The images


def test_made_files_hold_the_same_twelve_bits(made):
    pixels = samples.twelve_bits(SMALL)
    assert pixels.shape == SMALL and pixels.dtype == np.uint16 and 2000 < pixels.max() <= 4095
    for path, syntax in zip(made.values(), (uid.JPEG2000Lossless, uid.JPEGLosslessSV1), strict=True):
        header = pydicom.dcmread(path)
        assert header.file_meta.TransferSyntaxUID == syntax and header.BitsStored == 12
        np.testing.assert_array_equal(header.pixel_array, pixels)


def test_jpeg2000_copies_keep_pixels_and_display(tmp_path):
    source = samples.dicom_files.write(
        tmp_path / "a.dcm",
        samples.twelve_bits(SMALL),
        WindowCenter=[900, 1],
        WindowWidth=[700, 1],
        VOILUTFunction="SIGMOID",
    )
    (tmp_path / "copies").mkdir()
    (copy,) = samples.write_as_jpeg2000(tmp_path / "copies", [source])
    before, after = pydicom.dcmread(source), pydicom.dcmread(copy)
    np.testing.assert_array_equal(after.pixel_array, before.pixel_array)
    assert (after.WindowCenter, after.VOILUTFunction) == (before.WindowCenter, "SIGMOID")
    assert after.file_meta.TransferSyntaxUID == uid.JPEG2000Lossless


# Turns and ratios


def test_turns_bring_results_back_and_name_what_fails():
    opened = {"a": turns.Turn(zeros, 3), "b": turns.Turn(broken), "c": turns.Turn(zeros, 4)}
    first, timed = turns.in_turn(opened, ((2, 3),), rounds=2)
    for turn in opened.values():
        turn.close()
    assert first["a"].result.tolist() == [[3] * 3] * 2 and first["c"].result.max() == 4
    assert first["b"].error == "ModuleNotFoundError: No module named 'nobody_has_this'"
    assert {name: len(calls) for name, calls in timed.items()} == {"a": 2, "c": 2}
    assert all(call.seconds > 0 and call.result is None for calls in timed.values() for call in calls)


def test_a_process_that_dies_costs_its_own_calls_only():
    turn = turns.Turn(dying)
    assert turn.call().error == "the process died (exit code 7)"
    assert "died" in turn.call().error
    turn.close()


def test_ratios_are_taken_round_by_round():
    # The machine was ten times slower in the second round: the ratio is none the worse.
    assert turns.ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == turns.Ratio(3.0, 2.0, 4.0)


def test_a_decoder_is_timed_once():
    asked = {"pydicom": "pylibjpeg", "pydicom without gdcm": "pylibjpeg", "pydicom alone": "pydicom"}
    assert dicom_time.same_decoder(asked) == {"pydicom without gdcm": "pydicom"}
    assert dicom_time.same_decoder(dict.fromkeys(asked, "pydicom")) == dict.fromkeys(list(asked)[1:], "pydicom")


def test_a_peer_that_is_faster_is_named_and_one_that_cannot_read_is_no_match():
    first = {"dicomsdl": turns.Call(1, 1), "MONAI": turns.Call(0, 0, error="RuntimeError: no such decoder")}
    missing = dict.fromkeys(("MONAI, PydicomReader", "medip"), turns.Call(0, 0, error="ModuleNotFoundError: No module"))
    ratios = {"dicomsdl": turns.Ratio(1.2, 1.1, 1.3)}
    assert dicom_time.peers_verdict(ratios, first) == "yes; not installed: MONAI, PydicomReader, medip"
    ratios = {"dicomsdl": turns.Ratio(0.9, 0.8, 1.3)}
    assert dicom_time.peers_verdict(ratios, first | missing).startswith("no: dicomsdl (0.90); not installed: MONAI, ")


# The measurements themselves, in a round or two


def test_dicom_time_compares_a_file_with_its_baseline(made):
    case = dicom_time.Case("made", made["jpeg2000"], (128, 64), 1e6)
    (against_target,), (against_all,), (details,) = dicom_time.measure([case], 1, ("rsnakit", "pydicom"))
    ours, theirs = details["seconds"]["rsnakit"], details["seconds"]["pydicom"]
    assert details["ratios"]["pydicom"].median == pytest.approx(theirs[0] / ours[0])
    assert against_target["reached"] == "no"
    assert against_target["rsnakit, ms"] == pytest.approx(1000 * ours[0])
    assert against_target["its decoder"] in ("gdcm", "pylibjpeg", "pillow")
    assert list(against_all) == ["file", "to", "pydicom"]
    (row,) = dicom_time.results_of(case, details)
    assert row.what == "DICOM file to 128x64: made" and row.note == f"its decoder: {against_target['its decoder']}"
    assert tuple(row[3:6]) == tuple(details["ratios"]["pydicom"])


def test_cases_whose_files_are_absent_are_left_out_by_name(made, tmp_path):
    cases, left_out = dicom_time.find_cases(made, tmp_path)
    assert [case.target for case in cases[:3]] == [5.5, 14.0, 5.0]
    assert [reason.split(":")[0] for reason in left_out[-2:]] == ["mg_nema_j2k_lossy", "mg_ge_sigmoid_3windows_jpll"]


def test_stages_add_up_to_the_whole(made):
    (row,) = dicom_time.stage_rows([dicom_time.Case("made", made["jpeg2000"], (128, 64), 1)], 1)
    names = ("read", "decode", "search", "decode again", "rest")
    assert all(row[name] > 0 for name in ("read", "decode", "search", "rest"))
    assert sum(row[name] for name in names) == pytest.approx(row["whole"])


def test_differences_of_reduction_are_in_grey_levels(made):
    """Halving is asked for here, and smooths; where nothing is reduced the two images are one."""
    reduced = stages.reduction_difference(made["jpeg2000"], (128, 64))
    assert reduced["reduce"] >= 1
    assert 0 < reduced["mean"] < reduced["99th percentile"] < reduced["largest"] <= 255
    assert abs(reduced["brighter"]) <= reduced["mean"]
    whole = stages.reduction_difference(made["jpeg_lossless"], SMALL)
    assert (whole["reduce"], whole["largest"], whole["box moved"]) == (0, 0, 0)


def test_store_time_tells_times_bits_and_closeness(tmp_path):
    row, near = store_time.rows_of("drawn", samples.write_drawn(tmp_path, 2, (160, 120)), (128, 64), tmp_path / "s", 1)
    assert row["size"] == "128x64" and row["images"] == "2 drawn"
    # 8-bit codes and two uint16 for each 32 pixels, and the index and the manifest of so small a store.
    assert 9 < row["bits a pixel"] < 11 and 16 < row["raw16, bits"] < 18
    assert all(row[f"{kind}, ms"] > 0 for kind in ("block8", "raw16", "PNG"))
    assert len(near) == 2 and all(each["PSNR, dB"] > 60 for each in near)


def test_closeness_counts_exact_blocks_and_their_error():
    image = np.zeros((16, 16), np.uint16)  # eight tiles of 8 x 4
    image[:8, :8] = np.arange(64).reshape(8, 8)
    back = image.copy()
    back[3, 6] += 3  # in the second of the two that aren't constant
    near = store_time.closeness(back, image)
    assert near["exact blocks, %"] == 87.5 and near["of those that aren't constant, %"] == 50.0
    assert near["largest error"] == 3
    assert near["PSNR, dB"] == pytest.approx(20 * np.log10(4095 / (3 / 16)))  # root of 9 / 256
    assert store_time.closeness(image, image)["PSNR, dB"] == float("inf")


def test_build_time_builds_every_image_and_reckons_the_competition(tmp_path):
    images = build_time.images_of(samples.write_drawn(tmp_path, 2, (160, 120)), 5)
    assert images["image_id"].is_unique and images["path"].nunique() == 2
    seconds, _ = build_time.build(images, build_time.PreprocessConfig(height=64, width=32), n_jobs=1)
    assert seconds > 0
    # 100 images in 50 s and in 25 s; the second of three rounds was disturbed.
    row = build_time.summarize(100, {1: [50.0, 90.0, 50.0], 2: [25.0, 30.0, 25.0]}, [200.0, 350.0])
    assert (row["images/s, one process"], row["images/s, two"], row["ratio"]) == (2.0, 4.0, 2.0)
    assert row["54706 images, hours, one process"] == pytest.approx(7.598, abs=1e-3)
    assert row["4, if they gain as two do"] == pytest.approx(1.8995, abs=1e-3)
    assert (row["largest process, MB"], row["ratio reached"], row["memory reached"]) == (350.0, "yes", "yes")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_the_peak_of_a_childs_memory_is_seen():
    status = Path("/proc/self/status").read_text()
    own = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1000  # a child begins with what its parent holds
    with build_time.PeakMemory() as memory:
        turn = turns.Turn(zeros, 1)
        turn.call((4096, 4096))  # 128 MiB of int64
        for _ in range(200):  # the process stands by until it is closed, and is looked at every 50 ms
            if max(memory.mb.values(), default=0) > 134:
                break
            time.sleep(0.05)
        turn.close()
    assert 134 < max(memory.mb.values()) < own + 1000


# Training


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in loop_time.WAYS if name != loop_time.BARE])
def test_every_loop_does_what_the_bare_one_does(name, precision):
    package = {"Fabric": "lightning", "Lightning Trainer": "lightning", "Accelerate": "accelerate"}.get(name)
    if package:
        pytest.importorskip(package, reason="pip install -r tests/bench/requirements.txt brings it")
    if name == "Accelerate":  # it has one precision a process, and in a measurement a process of its own
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    bare = loop_time.open_bare(precision, 30)()
    found = loop_time.WAYS[name](precision, 30)()
    loop_time.check_alike(name, found, bare)
    assert found.seconds > 0 and found.items.tolist() == list(range(30 * loop_time.BATCH))
    assert np.ptp(found.scores) > 0.1


def test_a_loop_that_does_other_work_is_not_compared():
    bare = loop_time.open_bare("fp32", 30)()
    shorter = loop_time.open_bare("fp32", 29)()
    for other, what in (
        (bare._replace(items=shorter.items), "items"),
        (bare._replace(weights=bare.weights + 0.01), "weights"),
        (bare._replace(loss=bare.loss * 1.1), "loss"),
    ):
        with pytest.raises(RuntimeError, match=f"other {what}"):
            loop_time.check_alike("x", other, bare)


def test_loop_time_takes_turns_and_leaves_out_what_is_not_installed(monkeypatch):
    """Here in one process: what a process of its own is for is tested above."""
    calls = []

    class Here:
        def __init__(self, opener, *args):
            self.name = opener.__name__
            self.way = opener(*args) if opener is not broken else None

        def call(self, keep):
            calls.append(self.name)
            return turns.Call(1, 1, self.way()) if self.way else turns.Call(0, 0, error="ModuleNotFoundError: x")

        def close(self):
            pass

    monkeypatch.setattr(turns, "Turn", Here)
    monkeypatch.setitem(loop_time.WAYS, "Fabric", broken)
    seconds, failed = loop_time.measure("fp32", 5, 2, (loop_time.OURS, loop_time.BARE, "Fabric"))
    assert calls == ["open_rsnakit", "open_bare", "broken", "open_rsnakit", "open_bare", "open_bare", "open_rsnakit"]
    assert {name: len(each) for name, each in seconds.items()} == {loop_time.OURS: 2, loop_time.BARE: 2}
    assert failed == {"Fabric": "ModuleNotFoundError: x"}


def test_the_loops_verdict_names_who_is_faster():
    seconds = {"rsnakit": [1.2, 2.4], "bare loop": [1.0, 2.0], "Fabric": [1.1, 2.2], "Lightning Trainer": [3.0, 6.0]}
    rows = loop_time.rows_of(seconds, 1000)
    assert [row["times the bare loop"] for row in rows] == pytest.approx([1.2, 1.0, 1.1, 3.0])
    assert rows[0]["µs a step"] == pytest.approx(1800)
    assert loop_time.verdict(rows, {}) == {
        "within 1.3 times the bare loop": "yes",
        "below each of the others": "no: Fabric",
    }
    slow = {**seconds, "rsnakit": [1.4, 2.8], "Fabric": [1.2, 2.4]}
    verdict = loop_time.verdict(loop_time.rows_of(slow, 1000), {"Accelerate": "not there"})
    assert verdict == {
        "within 1.3 times the bare loop": "no: 1.40",
        "below each of the others": "no: Fabric",
        "could not run": "Accelerate (not there)",
    }


def test_amp_time_times_forward_and_step_in_both_precisions():
    case = amp_time.Case(2, (32, 32), 1.8)
    rows, times, profiles = amp_time.measure("resnet18", case, 2)
    assert [row["what"] for row in rows] == ["forward", "training step"]
    assert all(len(each) == 2 and all(0 < forward < step for forward, step in each) for each in times.values())
    assert rows[1]["fp32, ms"] == pytest.approx(500 * sum(step for _, step in times["fp32"]))
    assert rows[1]["from"] <= rows[1]["times as fast"] <= rows[1]["to"]
    assert [row["in"] for row in profiles] == ["fp32", "bf16"]
    assert all(row["convolutions, ms"] > 0 and row["norms, ms"] > 0 and row["copies, ms"] > 0 for row in profiles)
    assert all(row["depthwise ones, ms"] == 0 for row in profiles)


@pytest.mark.parametrize(("groups", "depthwise"), [(8, True), (1, False)])
def test_amp_time_tells_depthwise_convolutions_apart(groups, depthwise):
    layer = torch.nn.Conv2d(8, 8, 3, groups=groups)
    parts = amp_time.parts_of(lambda precision: layer(torch.ones(2, 8, 9, 9)).sum().backward(), "fp32", 1)
    assert (parts["depthwise ones, ms"] > 0) == depthwise and (parts["convolutions, ms"] > 0) != depthwise
    assert parts["the rest, ms"] > 0 and parts["matrix products, ms"] == 0
    assert not amp_time.is_depthwise([[2, 1, 9, 9], [8, 1, 3, 3]])  # a stem that takes one channel


def test_amp_time_has_a_target_where_the_processor_has_units():
    case, times = amp_time.Case(8, (256, 128), 1.8), {"fp32": [(1, 3.0), (1, 4.0)], "bf16": [(1, 2.0), (1, 2.0)]}
    result = amp_time.result_of("resnet18", case, times, "avx512_bf16")
    assert result[:3] == ("training step of resnet18 in bf16, 8 x 256x128", "fp32", "times as fast")
    assert result[3:] == (1.75, 1.5, 2.0, 1.8, False, "avx512_bf16")
    emulated = amp_time.result_of("resnet18", case, times, amp_time.NO_UNITS)
    assert emulated.target is None and "no bf16 units" in emulated.note


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu avx512f", "no bf16 units"),
        ("fpu avx512_bf16 amx_bf16 sse", "avx512_bf16, amx_bf16"),
        ("amx_bf16", "amx_bf16"),
    ],
)
def test_units_for_bf16_are_told(flags, found, tmp_path):
    (tmp_path / "cpuinfo").write_text(f"model name : x\nflags : {flags}\n")
    assert amp_time.units(tmp_path / "cpuinfo") == found
    assert amp_time.units(tmp_path / "none") == "bf16 units unknown"


def test_loader_time_loads_the_same_with_and_without_workers(tmp_path):
    store = loader_time.make_store(tmp_path / "s", (64, 32))
    assert len(store) == loader_time.DRAWN + len(samples.real_mammograms()) and (store.index["status"] == "ok").all()
    row, rates = loader_time.measure(store, "light", 32, 1)
    assert row["size"] == "64x32" and row["samples/s, 0 workers"] == rates[0][0] > 0
    assert row["ratio"] == pytest.approx(rates[2][0] / rates[0][0])
    loaded = [
        [
            (batch["item"].tolist(), batch["image"].sum().item())
            for batch in loader_time.loader_of(store, "light", n, 32)[0]
        ]
        for n in (0, 2)
    ]
    assert loaded[0] == loaded[1] and sum(len(items) for items, _ in loaded[0]) == 32


def test_loader_time_compares_loaders_of_the_same_images(tmp_path):
    block8 = loader_time.make_store(tmp_path / "s", (64, 32))
    stores = {"block8": block8, "raw16": loader_time.copy_store(block8, tmp_path / "raw16", "raw16")}
    paths = loader_time.write_pngs(block8, tmp_path / "png")
    usual = list(loader_time.usual_loader_of(paths, "none", 0, 40)[0])
    for store in stores.values():
        for ours, theirs in zip(loader_time.loader_of(store, "none", 0, 40)[0], usual, strict=True):
            assert torch.equal(ours["item"], theirs["item"]) and torch.equal(ours["cancer"], theirs["cancer"])
            assert ours["image"].dtype == theirs["image"].dtype == torch.float32
            torch.testing.assert_close(ours["image"], theirs["image"], rtol=0, atol=1e-5)
    augmented, _ = loader_time.usual_loader_of(paths, loader_time.PLAIN, 0, 40)
    assert not torch.equal(next(iter(augmented))["image"], usual[0]["image"])
    light = augment.build("light", 64, 32).pipeline.transforms[0]
    affine = loader_time.flips_then_affine()[2]  # PLAIN is what `light` is
    assert (light.scale, light.rotate, light.translate_percent) == (
        affine.scale,
        affine.rotate,
        affine.translate_percent,
    )
    assert light.warp_p == affine.p

    rates = {0: loader_time.compare(stores, paths, 0, 32, 1)}
    parts = loader_time.parts_of(stores, paths, 1)
    assert all(ms > 0 for ms in parts.values())
    results = loader_time.results_of({2: rates[0], 0: rates[0]}, parts, "64x32")
    assert [result.target for result in results] == [3.0, 3.0, 1.8, 1.8, 1.8] + [None] * 5
    usual_rate, our_rate = rates[0][loader_time.USUAL, "none"][0], rates[0]["block8", "none"][0]
    assert results[0].median == results[0].low == pytest.approx(our_rate / usual_rate)
    assert loader_time.rows_of(rates[0], 2)[0]["ratio"] == results[0].median
    costs = loader_time.cost_rows([block8[0].astype(np.float32) / 4095])
    assert {row["pipeline"] for row in costs} == set(augment.NAMES) - {"none"}


def test_loader_time_names_what_limits():
    parts = {"block8": 0.2, "light": 0.9, "written to memory that is there": 0.1, "written to new shared memory": 1.5}
    assert loader_time.limit_of(("block8", "light"), parts) == (
        "limit: augmentation (ms a sample in a worker: augmentation 0.90, decoding 0.20, writing to the batch 0.10)"
    )
    assert loader_time.limit_of(("block8", "none"), {**parts, "block8": 2}).startswith("limit: decoding")


def test_infer_time_scores_every_image_and_counts_its_seconds(tmp_path):
    competition = infer_time.competition_of(tmp_path / "c", samples.write_drawn(tmp_path, 2, (160, 120)), 10)
    test = tables.load_table(competition, "test")
    assert len(test) == 10 and test["image_id"].is_unique and test["breast_id"].nunique() == 5
    run = infer_time.make_run(tmp_path / "work")
    found = infer_time.whole(competition, run)
    assert found.images == 10 and found.seconds > 0 and found.cpu_seconds > 0
    infer_time.open_decoding(test["path"].tolist(), 3)()
    infer_time.open_model(run, test["path"][0], 8)()


def test_infer_time_compares_with_what_the_cores_could_do():
    # 2 cores, 10 ms to decode and 30 ms to score: 50 images/s. Three rounds, the second disturbed, of 400 images in 10 s.
    wholes = [infer_time.Whole(10.0, 20.0, 400), infer_time.Whole(40.0, 20.0, 400), infer_time.Whole(10.0, 20.0, 400)]
    row = infer_time.row_of("x", 2, [0.01] * 3, [0.03] * 3, wholes)
    assert row["bound, images/s"] == pytest.approx(50) and row["reached"] == pytest.approx(40)
    assert [row[name] for name in ("ratio", "from", "to")] == pytest.approx([0.8, 0.2, 0.8])
    assert row["CPU ms, all"] == pytest.approx(50) and row["share of it"] == pytest.approx(0.8)
    assert row["target reached"] == "no"
    faster = infer_time.row_of("x", 2, [0.01], [0.03], [infer_time.Whole(9.0, 17.0, 400)])
    assert faster["target reached"] == "yes"


def test_checkpoint_time_counts_what_differs():
    """timm's own moves BatchNorm's statistics twice a step."""
    rows, found = checkpoint_time.measure("resnet18", 2, 32, 1)
    assert [row["way"] for row in rows] == list(checkpoint_time.WAYS)
    assert found["differs"][checkpoint_time.PLAIN] == found["differs"][checkpoint_time.OURS] == []
    twice = found["differs"][checkpoint_time.TIMM]
    assert [row["statistics moved"] for row in rows] == [1, 1, 2]
    assert "layer1.0.bn1.running_mean" in twice and not [name for name in twice if name.startswith("gradient")]
    assert (
        rows[1]["of plain"] < 0.7 and rows[1]["of plain"] == found["kept"]["checkpoint_blocks"] / found["kept"]["plain"]
    )


def test_checkpoint_time_names_a_tensor_that_differs_or_is_missing():
    plain = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3), "c": torch.tensor(4)}
    found = {"a": torch.tensor([1.0, 2.0000002]), "b": torch.tensor(3), "d": torch.tensor(4)}
    assert checkpoint_time.different(found, plain) == ["a", "c", "d"]


def test_checkpoint_time_gives_bytes_and_time_with_their_targets():
    ways = checkpoint_time.WAYS
    found = {
        "kept": dict(zip(ways, (100, 15, 10), strict=True)),
        "seconds": dict(zip(ways, ([1.0, 2.0, 1.0], [1.5, 2.2, 1.2], [1, 1, 1]), strict=True)),
        "differs": dict(zip(ways, ([], [], ["x", "y", "z"]), strict=True)),
        "tensors": 9,
    }
    kept, times = checkpoint_time.results_of("convnext_tiny", found)
    assert (kept.median, kept.target, kept.at_most) == (0.15, 0.2, True)
    assert (times.median, times.low, times.high, times.target, times.at_most) == (1.2, 1.1, 1.5, 1.35, True)
    rows = checkpoint_time.results_of("tf_efficientnetv2_b0", found)
    assert [(row.median, row.target, row.note) for row in rows[2:]] == [
        (0, 0, "of 9"),
        (3, None, "of 9; x, y among them"),
    ]
    assert rows[0].target is None


def test_step_time_compares_what_the_kit_sets_with_what_would_be(monkeypatch, tmp_path, capsys):
    ms = {"plain layout, alone": 50.0, "channels last, alone": 25.0, "channels last, alone, default spins": 30.0}
    ms |= {"channels last, two at once": 60.0, "channels last, two at once, default spins": 90.0}
    of = {variant: ms[name] for name, variant in step_time.VARIANTS.items()}
    monkeypatch.setattr(step_time, "run", lambda *variant: of[variant])
    monkeypatch.setattr(sys, "argv", ["step_time.py", "--out", str(tmp_path), "--rounds", "2"])
    step_time.main()
    data = json.loads((tmp_path / "step_time.json").read_text())
    assert [row["median"] for row in data["results"]] == [2.0, 1.2, 1.5]
    assert [row["ms an image"] for row in data["sections"]["tf_efficientnet_lite0, 16 x 256x128, fp32"]] == list(
        ms.values()
    )


# What RESULTS.md gets


def test_dicom_time_says_which_peers_are_missing_and_goes_on():
    case = dicom_time.Case("made", Path("made.dcm"), (128, 64), 5.0)
    details = {
        "to": "128x64",
        "decoder": "gdcm",
        "ratios": {"pydicom": turns.Ratio(6.0, 5.0, 7.0), "dicomsdl": turns.Ratio(1.2, 1.1, 1.3)},
        "failed": {"MONAI": "ModuleNotFoundError: No module named 'monai'", "medip": "ValueError: no such file"},
    }
    usual, peer, missing, unable = dicom_time.results_of(case, details)
    assert usual[:2] == ("DICOM file to 128x64: made", dicom_time.USUAL)
    assert usual[2:] == ("times as fast", 6.0, 5.0, 7.0, 5.0, False, "its decoder: gdcm")
    assert (peer.against, peer.median, peer.target) == ("dicomsdl", 1.2, 1.0)
    assert np.isnan(missing.median) and missing.note == "not installed" and missing.against == "MONAI"
    assert unable.note == "ValueError: no such file"


def test_dicom_time_goes_on_where_the_usual_path_has_no_decoder(made, monkeypatch):
    monkeypatch.setitem(dicom_time.WAYS, "pydicom", (broken,))
    case = dicom_time.Case("made", made["jpeg_lossless"], (128, 64), 5.0)
    (against_target,), _, (details,) = dicom_time.measure([case], 1, ("rsnakit", "pydicom"))
    assert against_target["times faster"] == "not measured: not installed" and against_target["reached"] == ""
    (row,) = dicom_time.results_of(case, details)
    assert np.isnan(row.median) and (row.against, row.target) == (dicom_time.USUAL, 5.0)


def test_loop_time_has_a_row_for_each_other_loop():
    seconds = {"rsnakit": [1.2, 2.4], "bare loop": [1.0, 2.0], "Fabric": [2.4, 2.4]}
    failed = {"Accelerate": "ModuleNotFoundError: No module named 'accelerate'"}
    bare, fabric, missing = loop_time.results_of("bf16", seconds, failed)
    assert (bare.median, bare.target, bare.at_most) == (1.2, 1.3, True)
    assert (fabric.against, fabric.median, fabric.low, fabric.high, fabric.target) == ("Fabric", 0.75, 0.5, 1.0, 1.0)
    assert np.isnan(missing.median) and missing.note == "not installed"


def test_other_benches_give_their_ratios_with_targets(tmp_path):
    row, _ = store_time.rows_of("drawn", samples.write_drawn(tmp_path, 2, (160, 120)), (128, 64), tmp_path / "s", 1)
    faster, size = store_time.results_of([row])
    assert (faster.median, faster.target) == (row["times faster than PNG"], 8.0)
    assert faster.low == pytest.approx(float(row["slowest to fastest round"].split()[0]))
    assert size.median == pytest.approx(row["bits a pixel"] / row["PNG, bits"])
    seconds = {1: [50.0, 90.0, 50.0], 2: [25.0, 30.0, 25.0]}
    built = build_time.result_of("64x32", 100, seconds, build_time.summarize(100, seconds, [350.0]))
    assert built[3:8] == (2.0, 2.0, 3.0, 1.7, False) and "350 MB" in built.note and "54706 images" in built.note
    inferred = infer_time.result_of(infer_time.row_of("x", 2, [0.01], [0.03], [infer_time.Whole(10.0, 20.0, 400)]))
    assert (inferred.median, inferred.target) == (pytest.approx(0.8), 0.85) and "40 images/s" in inferred.note
    rows = [{"way": "rsnakit", "ms": 1.0, "times ours": 1.0, "from": 1.0, "to": 1.0}]
    rows += [{"way": way, "ms": 9.0, "times ours": 9.0, "from": 8.0, "to": 9.5} for way in (metrics_time.SKLEARN, "x")]
    ours, other = metrics_time.results_of("best", rows, 2.5)
    assert ours[:8] == ("best", metrics_time.SKLEARN, "times as fast", 9.0, 8.0, 9.5, 2.5, False)
    assert other.target is None and ours.note == "ours 1 ms of a core"


# Scores


def test_metrics_time_compares_ways_that_answer_alike():
    data = metrics_time.draw(600, 150, 60)
    assert data.labels.sum() == 60 and len(np.unique(data.patients)) == 150
    rows, seconds = metrics_time.measure(metrics_time.THRESHOLD, data[:2], 2)
    assert [row["way"] for row in rows][:2] == [metrics_time.OURS, metrics_time.SKLEARN]
    assert all(len(each) == 2 and min(each) > 0 for each in seconds.values())
    ratios = [a / b for a, b in zip(seconds[metrics_time.SKLEARN], seconds[metrics_time.OURS], strict=True)]
    assert rows[1]["times ours"] == pytest.approx(sum(ratios) / 2)
    rows, _ = metrics_time.measure(metrics_time.BOOTSTRAP, (data, 20), 1)
    assert len(rows) == 4 and rows[0]["times ours"] == 1.0


def test_metrics_time_compares_no_other_answers():
    ways = {metrics_time.OURS: lambda: (0.5, 1.0), "other": lambda: (0.5, 0.9)}
    with pytest.raises(RuntimeError, match=r"other finds \(0.5, 0.9\), rsnakit \(0.5, 1.0\)"):
        metrics_time.measure(ways, (), 1)


def test_the_verdict_on_scores_names_the_target():
    rows = [{"way": metrics_time.OURS, "times ours": 1.0}, {"way": metrics_time.SKLEARN, "times ours": 99.4}]
    assert metrics_time.verdict(rows, 100) == "target 100 times faster than scikit-learn: no, 99.4"
    assert metrics_time.verdict(rows, 2.5) == "target 2.5 times faster than scikit-learn: yes, 99.4"


# What is told


def test_tables_and_json_are_written(tmp_path, capsys):
    rows = [
        {"file": "a|b", "ms": 1234.5, "times": 5.678, "n": 3},
        {"file": "c", "ms": 0.5, "times": float("inf"), "n": 4},
    ]
    path = table.save(tmp_path / "new", "x", {"First": rows, "None": []}, {"raw": turns.Ratio(1.0, 0.5, 2.0)})
    text = path.read_text()
    assert (
        "| file | ms | times | n |\n| --- | --: | --: | --: |\n| a/b | 1234 | 5.68 | 3 |\n| c | 0.5 | inf | 4 |" in text
    )
    assert "(no rows)" in text and "numpy" in text.splitlines()[-1] and text.strip() in capsys.readouterr().out
    data = json.loads((tmp_path / "new" / "x.json").read_text())
    assert data["details"]["raw"] == [1.0, 0.5, 2.0] and data["machine"]["numpy"] == np.__version__
    assert data["sections"]["First"][0]["ms"] == 1234.5
