"""rsnakit.preprocess on small files: one file to an image, and many to a store that survives what happens to it."""

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from dicom_files import j2k, write
from pydicom import uid

from rsnakit import env, preprocess, store, workers
from rsnakit.dicom import DicomError
from rsnakit.env import RunConfig
from rsnakit.files import Lock, LockedError
from rsnakit.phantom import draw_breast
from rsnakit.preprocess import BlankImage, PreprocessConfig, build_store, ensure_store, load_image, prepare
from rsnakit.store import Store, StoreError
from rsnakit.workers import ProcessDied

CONFIG = PreprocessConfig(height=64, width=32)
WHOLE = PreprocessConfig(height=200, width=160, crop=False)  # of the frames written here, pixel by pixel
WINDOW = {"WindowCenter": 2048, "WindowWidth": 4096}  # the whole of 12 bits


@functools.lru_cache
def phantom(seed: int = 0, laterality: str = "L") -> np.ndarray:
    """(200, 160) uint16 of 12 bits, a breast on black."""
    return draw_breast(np.random.default_rng(seed), (200, 160), laterality=laterality)[0]


def write_many(folder: Path, count: int, encode=None, syntax=uid.ExplicitVRLittleEndian) -> pd.DataFrame:
    """A table of `count` files; ids have zeros in front."""
    folder.mkdir()
    paths = [write(folder / f"{i:03}.dcm", phantom(i), encode, syntax, **WINDOW) for i in range(count)]
    ids = [f"{i:03}" for i in range(count)]
    return pd.DataFrame({"patient_id": [f"0{i[:2]}" for i in ids], "image_id": ids, "path": [str(p) for p in paths]})


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> pd.DataFrame:
    """36 good JPEG 2000 files; do not write to them."""
    return write_many(tmp_path_factory.mktemp("files") / "a", 36, j2k(12), uid.JPEG2000Lossless)


@pytest.fixture(scope="module")
def finished(table, tmp_path_factory) -> Path:
    """Their store, made without a pause; do not write to it."""
    folder = tmp_path_factory.mktemp("stores") / "finished"
    build_store(table, CONFIG, folder, n_jobs=1)
    return folder


def index_without_times(folder: Path) -> pd.DataFrame:
    return store.read_index(folder).drop(columns="seconds")


def run_python(code: str, *arguments: object) -> tuple[int, str]:
    """Runs code in a process of its own; its exit code, and what it wrote."""
    here = Path(__file__).parent
    environ = {**os.environ, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with tempfile.TemporaryFile() as said:  # a pipe would stay open until joblib's processes have gone too
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environ, start_new_session=True)
        try:
            process.wait(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # workers outlive a killed parent for some minutes
        said.seek(0)
        return process.returncode, said.read().decode()


def no_more_than_one_grey_level(a: np.ndarray, b: np.ndarray) -> bool:
    return np.abs(a.astype(int) - b.astype(int)).max() <= 4095 / 255


# One file


@pytest.mark.parametrize("window", ["first", "none"])
@pytest.mark.parametrize("elements", [WINDOW, {}, {"WindowCenter": 1500, "WindowWidth": 1800}], ids=str)
def test_monochrome1_is_prepared_like_monochrome2(tmp_path, window, elements):  # D01
    pixels = phantom()
    turned = dict(elements)
    if "WindowCenter" in turned:
        turned["WindowCenter"] = 4096 - turned["WindowCenter"]
    plain = write(tmp_path / "2.dcm", pixels, **elements)
    inverse = write(tmp_path / "1.dcm", 4095 - pixels, PhotometricInterpretation="MONOCHROME1", **turned)
    config = PreprocessConfig(height=64, width=32, window=window)
    one, other = load_image(plain, config), load_image(inverse, config)
    assert no_more_than_one_grey_level(one, other)
    assert np.median(one[:3, -8:]) < 400 < np.median(one[20:44, :8])  # background dark, breast bright

    table = pd.DataFrame({"patient_id": ["1", "1"], "image_id": ["2", "1"], "path": [plain, inverse]})
    for _ in range(2):  # made, and opened again
        images = build_store(table, config, tmp_path / "store", n_jobs=1, image_format="raw16")
        np.testing.assert_array_equal(images[0], one)
        np.testing.assert_array_equal(images[1], other)


def test_narrow_values_fill_the_range(tmp_path):  # D19
    values = 300 + (600 * (phantom() / phantom().max())).astype(np.uint16)
    image = load_image(write(tmp_path / "a.dcm", values), CONFIG)
    assert image.min() == 0 and image.max() > 0.7 * 4095  # averaging takes the peaks
    whole = load_image(tmp_path / "a.dcm", WHOLE)
    assert (whole.min(), whole.max()) == (0, 4095)


def test_values_are_the_display_values_in_12_bits(tmp_path):
    pixels = phantom()
    path = write(tmp_path / "a.dcm", pixels, **WINDOW)
    image = load_image(path, WHOLE)
    assert image.dtype == np.uint16 and image.shape == (200, 160)
    np.testing.assert_array_equal(image, pixels)  # this window maps 0..4095 to [0, 1]

    span = load_image(path, PreprocessConfig(height=200, width=160, crop=False, window="none"))
    stretched = (pixels.astype(float) - pixels.min()) / (int(pixels.max()) - int(pixels.min()))
    np.testing.assert_allclose(span, 4095 * stretched, atol=0.51)


@pytest.mark.parametrize("laterality", ["L", "R"])
def test_box_is_in_pixels_of_the_file_whatever_its_header_says_of_the_side(tmp_path, laterality):
    pixels, mask = draw_breast(np.random.default_rng(3), (200, 160), laterality=laterality)
    wrong = "R" if laterality == "L" else "L"
    path = write(tmp_path / "a.dcm", pixels, ImageLaterality=wrong, **WINDOW)
    prepared = prepare(path, PreprocessConfig(height=64, width=32, crop_margin=0.0))
    assert prepared.flipped == (laterality == "R")
    assert prepared.source_shape == (200, 160)
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    expected = (rows[0], columns[0], rows[-1] + 1, columns[-1] + 1)
    np.testing.assert_allclose(prepared.box, expected, atol=3)
    assert prepared.image[:, :8].mean() > 2 * prepared.image[:, -8:].mean()  # the chest wall is at the left


def test_margin_widens_the_box_within_the_frame(tmp_path):
    path = write(tmp_path / "a.dcm", phantom(3), **WINDOW)
    tight, wide, whole = (
        np.array(prepare(path, PreprocessConfig(height=64, width=32, crop_margin=share)).box) for share in (0, 0.1, 0.5)
    )
    height, width = tight[2] - tight[0], tight[3] - tight[1]
    expected = tight + np.round(0.1 * np.array([-height, -width, height, width]))
    np.testing.assert_array_equal(wide, np.clip(expected, 0, [200, 160, 200, 160]))
    assert whole[0] == whole[1] == 0 and whole[2] == 200


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (90, 40), (64, 32), (700, 60), (500, 250)])
def test_a_circle_stays_a_circle_and_padding_is_right_and_even(size):
    y, x = np.mgrid[: size[0], : size[1]]
    radius = 0.4 * min(size)
    circle = np.hypot(y - (size[0] - 1) / 2, x - (size[1] - 1) / 2) <= radius
    image = preprocess.fit_and_pad(0.25 + 0.75 * circle.astype(np.float32), 128, 64)
    assert image.shape == (128, 64)
    seen = image > 0.25 * 1.01 + 0.37
    height, width = seen.any(axis=1).sum(), seen.any(axis=0).sum()
    scale = min(128 / size[0], 64 / size[1])
    assert abs(int(height) - int(width)) <= 1
    assert height == pytest.approx(2 * radius * scale, abs=1.5)

    inside = image > 0
    rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
    assert columns[0] == 0 and len(columns) == round(size[1] * scale)
    assert len(rows) == round(size[0] * scale)
    assert abs(rows[0] - (127 - rows[-1])) <= 1


@pytest.mark.parametrize("size", [(1, 40), (40, 1), (8, 8), (17, 3)])
def test_tiny_frames(tmp_path, size):
    pixels = np.arange(size[0] * size[1], dtype=np.uint16).reshape(size) * 20
    image = load_image(write(tmp_path / "a.dcm", pixels), CONFIG)
    assert image.shape == (64, 32) and image.max() > 2000


def test_blank_images_are_refused(tmp_path):  # D12
    black = write(tmp_path / "black.dcm", np.zeros((200, 160), np.uint16), **WINDOW)
    off = write(tmp_path / "off.dcm", phantom(), WindowCenter=9000, WindowWidth=100)
    for path, reason in ((black, "nearly every stored value is 0"), (off, "its window leaves nearly every pixel")):
        with pytest.raises(BlankImage, match=reason) as refused:
            load_image(path, CONFIG)
        assert refused.value.path == str(path)
    assert load_image(off, PreprocessConfig(height=64, width=32, window="none")).max() > 2000


# Many files


def test_store_holds_what_load_image_gives(table, tmp_path):
    few = table.head(6)
    exact = build_store(few, CONFIG, tmp_path / "raw", n_jobs=1, image_format="raw16")
    packed = build_store(few, CONFIG, tmp_path / "packed", n_jobs=1)
    assert exact.shape == packed.shape == (64, 32)
    for row, path in enumerate(few["path"]):
        image = load_image(path, CONFIG)
        np.testing.assert_array_equal(exact[row], image)
        blocks, back = image.reshape(-1, 32).astype(int), packed[row].reshape(-1, 32).astype(int)
        half_a_step = -(-np.ptp(blocks, axis=1, keepdims=True) // 255) / 2
        assert (np.abs(blocks - back) <= half_a_step).all()
        assert prepare(path, CONFIG).box == tuple(exact.index.loc[row, ["top", "left", "bottom", "right"]])
    assert exact.index["image_id"].tolist() == few["image_id"].tolist()
    assert exact.index["patient_id"].tolist() == few["patient_id"].tolist()
    assert (exact.index[["source_height", "source_width"]].to_numpy() == (200, 160)).all()
    assert exact.index["source_bytes"].tolist() == [os.path.getsize(path) for path in few["path"]]


@pytest.mark.parametrize("coding", ["native", "encapsulated"])
def test_bad_files_among_good_ones_are_named_and_the_rest_is_done(tmp_path, coding):  # D12, D13, D15
    how = (j2k(12), uid.JPEG2000Lossless) if coding == "encapsulated" else ()
    table = write_many(tmp_path / "files", 23, *how)
    paths = [Path(path) for path in table["path"]]
    paths[7].write_bytes(paths[7].read_bytes()[: int(0.9 * os.path.getsize(paths[7]))])
    paths[20].unlink()
    write(paths[21], np.zeros((200, 160), np.uint16), *how)
    paths[22].write_text("notes on the images, " * 20)
    images = build_store(table, CONFIG, tmp_path / "store", n_jobs=2 if how else 1)
    index = images.index.set_index("image_id")
    assert index["status"].value_counts().to_dict() == {"ok": 19, "failed": 3, "blank": 1}
    expected = {"007": ("failed", "cut short"), "020": ("failed", "No such file"), "021": ("blank", "stored value is 0"),
                "022": ("failed", "not a DICOM file")}  # fmt: skip
    for image_id, (status, reason) in expected.items():
        assert index.loc[image_id, "status"] == status
        assert reason in index.loc[image_id, "reason"]
        assert "\n" not in index.loc[image_id, "reason"]
        with pytest.raises(StoreError, match=image_id):
            images[int(images.rows_of([image_id])[0])]
    assert len((tmp_path / "store" / "index.csv").read_text().splitlines()) == 24

    write(paths[7], phantom(7), *how, **WINDOW)  # copied again, whole this time
    images = build_store(table, CONFIG, tmp_path / "store", n_jobs=1)
    assert images.index["status"].value_counts().to_dict() == {"ok": 20, "failed": 2, "blank": 1}
    assert images.index["image_id"].tolist() == table["image_id"].tolist()
    np.testing.assert_allclose(images[7].astype(int), load_image(paths[7], CONFIG), atol=8)


def test_an_error_nobody_foresaw_costs_one_image(table, tmp_path, monkeypatch):
    def odd(path, config):
        if "003" in path:
            raise OverflowError("nobody\nforesaw")
        return prepare(path, config)

    monkeypatch.setattr(preprocess, "prepare", odd)
    index = build_store(table.head(6), CONFIG, tmp_path / "store", n_jobs=1).index
    assert index["status"].tolist() == ["ok", "ok", "ok", "failed", "ok", "ok"]
    assert index["reason"][3] == "OverflowError: nobody foresaw"


def test_file_over_which_a_process_is_killed_is_named(table, tmp_path, monkeypatch):  # D17; see test_workers.py too
    def over_items(function, items, n_jobs):
        for item in items:
            yield item, ProcessDied("the process was killed") if item[2] == "002" else function(item)

    monkeypatch.setattr(workers, "over_items", over_items)
    images = build_store(table.head(5), CONFIG, tmp_path / "store", n_jobs=2)
    assert images.index["status"].tolist() == ["ok", "ok", "failed", "ok", "ok"]
    assert images.index["reason"][2] == "ProcessDied: the process was killed"
    np.testing.assert_allclose(images[4].astype(int), load_image(table["path"][4], CONFIG), atol=8)


def test_processes_change_no_byte(table, finished, tmp_path):  # D17
    build_store(table, CONFIG, tmp_path / "store", n_jobs=2)
    assert (tmp_path / "store" / "images.bin").read_bytes() == (finished / "images.bin").read_bytes()
    pd.testing.assert_frame_equal(index_without_times(tmp_path / "store"), index_without_times(finished))
    assert sorted(path.name for path in finished.iterdir()) == ["images.bin", "index.csv", "manifest.json"]


KILLED = """
import os, signal, sys
import pandas as pd
from rsnakit import preprocess, store
table = pd.read_csv(sys.argv[1], dtype=str)
append, written = store.append_index, []
def append_and_die(path, rows):
    append(path, rows)
    written.extend(rows)
    if len(written) >= 13:
        with open(path / "index.csv", "a") as f:
            f.write("35,007,03")  # the kill comes in the middle of a line
        os.kill(os.getpid(), signal.SIGKILL)
preprocess.COMMIT_S = 0
store.append_index = append_and_die
preprocess.build_store(table, preprocess.PreprocessConfig(height=64, width=32), sys.argv[2], int(sys.argv[3]))
"""


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_killed_build_goes_on_and_ends_with_the_same_bytes(table, finished, tmp_path, monkeypatch, n_jobs):  # C01
    table.to_csv(tmp_path / "table.csv", index=False)
    folder = tmp_path / "store"
    code, said = run_python(KILLED, tmp_path / "table.csv", folder, n_jobs)
    assert code == -signal.SIGKILL, said
    assert (folder / "lock.json").exists()
    done = set(store.read_index(folder)["image_id"])
    assert 13 <= len(done) < 36
    again = []
    monkeypatch.setattr(
        preprocess, "prepare", lambda path, config: again.append(Path(path).stem) or prepare(path, config)
    )
    images = build_store(table, CONFIG, folder, n_jobs=1)
    assert sorted(again) == sorted(set(table["image_id"]) - done)
    assert (folder / "images.bin").read_bytes() == (finished / "images.bin").read_bytes()
    pd.testing.assert_frame_equal(index_without_times(folder), index_without_times(finished))
    assert sorted(path.name for path in folder.iterdir()) == ["images.bin", "index.csv", "manifest.json"]
    again.clear()
    assert len(build_store(table, CONFIG, folder, n_jobs=1)) == len(images) == 36
    assert again == []


def test_a_part_first_and_then_all(table, finished, tmp_path):
    some = table.iloc[[20, 3, 11]]
    build_store(some, CONFIG, tmp_path / "store", n_jobs=1)
    images = build_store(table, CONFIG, tmp_path / "store", n_jobs=1)
    whole = Store(finished)
    assert len(images) == 36
    for image_id in table["image_id"]:
        here, there = (int(opened.rows_of([image_id])[0]) for opened in (images, whole))
        np.testing.assert_array_equal(images[here], whole[there])


@pytest.mark.parametrize(
    ("change", "image_format", "named"),
    [
        ({"crop_margin": 0.1}, "block8", "crop_margin is 0.02 in the store and 0.1 now"),
        ({"window": "none"}, "block8", "window is 'first' in the store and 'none' now"),
        ({"height": 128}, "block8", "height is 64 in the store and 128 now"),
        ({}, "raw16", "format is 'block8' in the store and 'raw16' now"),
    ],
)
def test_store_of_other_settings_is_refused_by_name(table, tmp_path, change, image_format, named):  # P03
    folder = tmp_path / "store"
    build_store(table.head(3), CONFIG, folder, n_jobs=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = PreprocessConfig(**{"height": 64, "width": 32} | change)
    for build in (True, False):
        with pytest.raises(StoreError, match=named):
            ensure_store(table.head(4), other, folder, RunConfig(n_jobs=1, store_format=image_format), build)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    run = env.RunConfig(store_format=image_format)  # left to itself it goes elsewhere
    paths = {
        preprocess.store_path(tmp_path, Path("/data/rsna"), *pair) for pair in ((CONFIG, env.RunConfig()), (other, run))
    }
    assert len(paths) == 2 and all(path.parent == tmp_path / "stores" for path in paths)


def test_files_of_another_competition_under_the_same_ids_are_refused(table, tmp_path):
    folder = tmp_path / "store"
    build_store(table.head(3), CONFIG, folder, n_jobs=1)
    other = write_many(tmp_path / "others", 3)
    with pytest.raises(StoreError, match="image 000 was stored from a file of") as refused:
        build_store(other, CONFIG, folder, n_jobs=1)
    for size in (os.path.getsize(other["path"][0]), os.path.getsize(table["path"][0])):
        assert str(size) in str(refused.value)


def test_disk_too_small_is_found_out_before_any_work(table, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    needed = preprocess.estimate_bytes(len(table), CONFIG)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, needed - 1))
    monkeypatch.setattr(preprocess, "prepare", None)  # nobody may call it
    with pytest.raises(OSError, match="store of 36 images needs") as refused:
        build_store(table, CONFIG, tmp_path / "store", n_jobs=1)
    assert refused.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_lacking_needs_room(table, tmp_path, monkeypatch):
    build_store(table.head(34), CONFIG, tmp_path / "store", n_jobs=1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, preprocess.estimate_bytes(2, CONFIG)))
    assert len(build_store(table, CONFIG, tmp_path / "store", n_jobs=1)) == 36


def test_disk_that_fills_up_stops_the_build_and_keeps_what_is_done(table, finished, tmp_path, monkeypatch):
    real = store.write_record

    def full(path, row, record):
        if row == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, row, record)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_record", full)
        with pytest.raises(OSError, match="No space"):
            build_store(table.head(8), CONFIG, tmp_path / "store", n_jobs=1)
    assert store.read_index(tmp_path / "store")["row"].tolist() == [0, 1, 2, 3, 4]
    build_store(table, CONFIG, tmp_path / "store", n_jobs=1)
    assert (tmp_path / "store" / "images.bin").read_bytes() == (finished / "images.bin").read_bytes()


def test_second_writer_is_refused(table, tmp_path):
    with Lock(tmp_path / "store", "store"), pytest.raises(LockedError, match="store"):
        build_store(table, CONFIG, tmp_path / "store", n_jobs=1)


QUIET = """
import os, sys
from pathlib import Path
import pandas as pd
from rsnakit import preprocess
table = pd.read_csv(sys.argv[1], dtype=str)
preprocess.build_store(table, preprocess.PreprocessConfig(height=64, width=32), sys.argv[2], 2)
shared = Path("/dev/shm")
print("left:", [path.name for path in shared.glob(f"*{os.getpid()}*")] if shared.exists() else [], flush=True)
os._exit(0)  # as killed: nothing is tidied up at exit
"""


def test_build_in_processes_leaves_nothing_behind_and_says_little(table, tmp_path):  # N06
    many = pd.concat([table.assign(image_id=table["image_id"] + f"-{i}") for i in range(3)])
    many.to_csv(tmp_path / "table.csv", index=False)
    code, said = run_python(QUIET, tmp_path / "table.csv", tmp_path / "store")
    assert code == 0 and "108/108" in said and "left: []" in said, said
    for complaint in ("leaked", "Warning", "Error"):
        assert complaint not in said
    assert len(said) < 3000


# What notebooks ask


def test_ensure_store_opens_what_is_complete_and_else_gives_the_command(table, finished, tmp_path):
    command = r"papermill 02_preprocess\.ipynb out\.ipynb -p n_jobs 1 -p height 64 -p width 32"
    with pytest.raises(StoreError, match=command):
        ensure_store(table, CONFIG, tmp_path / "none", RunConfig(n_jobs=1), build=False)
    assert not (tmp_path / "none").exists()
    assert len(ensure_store(table, CONFIG, finished, RunConfig(n_jobs=1), build=False)) == 36
    more = pd.concat([table, table.head(2).assign(image_id=["x", "y"])])
    with pytest.raises(StoreError, match=f"2 of 38 images are not in it yet.*\n.*{command}"):
        ensure_store(more, CONFIG, finished, RunConfig(n_jobs=1), build=False)
    assert len(ensure_store(table.head(2), CONFIG, tmp_path / "new", RunConfig(n_jobs=1), build=True)) == 2


def test_store_dir_goes_before_the_name_made_of_the_settings(tmp_path):
    chosen = preprocess.store_path(tmp_path, Path("/data/rsna"), CONFIG, env.RunConfig(store_dir=str(tmp_path / "x")))
    assert chosen == tmp_path / "x"
    path = preprocess.store_path(tmp_path, Path("/data/rsna"), CONFIG, env.RunConfig())
    text = '{"crop": true, "crop_margin": 0.02, "format": "block8", "height": 64, "width": 32, "window": "first"}'
    assert path == tmp_path / "stores" / f"rsna-64x32-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def test_estimates(table, finished):
    size = sum((finished / name).stat().st_size for name in ("images.bin", "index.csv"))
    assert size <= preprocess.estimate_bytes(36, CONFIG) <= 1.1 * size
    assert preprocess.estimate_bytes(1, CONFIG, "raw16") >= 2 * 64 * 32
    bad = table.head(1).assign(path="/nowhere.dcm")
    assert 0 < preprocess.estimate_seconds(pd.concat([table, bad]), CONFIG, n=40) < 1
    assert np.isnan(preprocess.estimate_seconds(bad, CONFIG))


def test_format_difference_tells_what_block8_does(table):
    shown = preprocess.format_difference([Path(path) for path in table["path"].head(3)], CONFIG)
    assert shown.index.tolist() == ["000", "001", "002"]
    assert (shown["bits a pixel"] == 9).all()
    assert shown["largest error"].between(1, 8).all()  # 4096 levels in 256 codes: a step of at most 17
    assert (shown["mean error"] < shown["largest error"]).all() and shown["exact pixels, %"].between(1, 100).all()


def test_missing_file_is_a_dicom_error(tmp_path):
    with pytest.raises(DicomError, match=r"nowhere\.dcm"):
        load_image(tmp_path / "nowhere.dcm", CONFIG)
