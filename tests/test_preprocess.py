"""rsnakit.preprocess on small files: many to a store that survives what happens to it."""

import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import pytest
from dicom_files import j2k, jpeg_lossless, write
from phantoms import CONFIG, WINDOW, deadly, phantom, write_many
from pydicom import uid

from rsnakit import env, headers, jobs, params, preprocess, store, workers
from rsnakit.dicom import DicomError
from rsnakit.env import RunConfig
from rsnakit.files import Lock, LockedError
from rsnakit.headers import scan_headers
from rsnakit.phantom import draw_breast
from rsnakit.preprocess import BuildConfig, PreprocessConfig, build_store, ensure_store, load_image, prepare
from rsnakit.store import Store, StoreError


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


def test_store_holds_what_load_image_gives(table, tmp_path):
    few = table.head(6)
    exact = build_store(few, CONFIG, tmp_path / "raw", n_jobs=1, image_format="raw16")
    packed = build_store(few, CONFIG, tmp_path / "packed", n_jobs=1)
    assert exact.shape == packed.shape == (64, 32)
    for row, path in enumerate(few["path"]):
        image = load_image(path, CONFIG)
        np.testing.assert_array_equal(exact[row], image)
        np.testing.assert_allclose(packed[row].astype(int), image, atol=8.5)  # half of 4096 levels in 8 bits
        assert prepare(path, CONFIG).box == tuple(exact.index.loc[row, ["top", "left", "bottom", "right"]])
    assert exact.index["image_id"].tolist() == few["image_id"].tolist()
    assert exact.index["patient_id"].tolist() == few["patient_id"].tolist()
    assert (exact.index[["source_height", "source_width"]].to_numpy() == (200, 160)).all()
    assert exact.index["source_bytes"].tolist() == [os.path.getsize(path) for path in few["path"]]


@pytest.mark.parametrize("image_format", ["block8", "raw16", "png8"])
def test_the_index_tells_equal_images_by_their_pixels(tmp_path, image_format):  # V04
    table = write_many(tmp_path / "files", 4)
    shutil.copy(table["path"].iloc[1], table["path"].iloc[3])  # the same file under another id
    write(Path(table["path"].iloc[2]), np.zeros((200, 160), np.uint16))
    index = build_store(table, CONFIG, tmp_path / "store", n_jobs=1, image_format=image_format).index
    assert index["status"].tolist() == ["ok", "ok", "blank", "ok"]
    content = index["content"].tolist()
    assert content[1] == content[3] != content[0] and content[2] == ""
    pixels = load_image(table["path"].iloc[0], CONFIG)
    assert content[0] == hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest()  # of what is stored, any format
    assert jobs.content_hash(np.asfortranarray(pixels)) == content[0] != jobs.content_hash(pixels ^ 1)


@pytest.mark.parametrize(("image_format", "n_jobs"), [("png16", 2), ("png8", 1)])
def test_png_stores_hold_files_that_others_read(table, tmp_path, image_format, n_jobs):
    images = build_store(table, CONFIG, tmp_path / "store", n_jobs, image_format)
    assert images.index["image_id"].tolist() == table["image_id"].tolist()
    for row, (patient_id, image_id, path) in enumerate(table[["patient_id", "image_id", "path"]].to_numpy()):
        image = load_image(path, CONFIG)
        np.testing.assert_allclose(images[row].astype(int), image, atol=8 if image_format == "png8" else 0)
        file = cv2.imread(str(tmp_path / "store" / "images" / patient_id / f"{image_id}.png"), cv2.IMREAD_UNCHANGED)
        levels = 255 if image_format == "png8" else 65535
        np.testing.assert_allclose(file / levels, image / 4095, atol=0.51 / levels)
    size = sum(file.stat().st_size for file in (tmp_path / "store").rglob("*.*"))
    assert size <= preprocess.estimate_bytes(36, CONFIG, image_format) <= 3 * size


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


def test_bar_counts_what_is_there_what_failed_and_what_is_blank(tmp_path, capsys):
    table = write_many(tmp_path / "files", 12)
    build_store(table.head(5), CONFIG, tmp_path / "store", n_jobs=1)
    Path(table["path"][6]).write_bytes(b"")
    Path(table["path"][7]).unlink()
    write(table["path"][8], np.zeros((200, 160), np.uint16))
    capsys.readouterr()
    build_store(table, CONFIG, tmp_path / "store", n_jobs=1)
    said = capsys.readouterr().err
    assert "| 5/12 [" in said  # before the first of the others
    last = said[said.rindex("| 12/12 [") :]
    assert "image/s" in last and "failed=2, blank=1" in last


def test_prepared_image_of_which_nothing_is_left_is_blank(table, tmp_path, monkeypatch):
    def emptied(path, config):
        prepared = prepare(path, config)
        return dataclasses.replace(prepared, image=prepared.image * ("002" not in path))

    monkeypatch.setattr(jobs, "prepare", emptied)
    index = build_store(table.head(4), CONFIG, tmp_path / "store", n_jobs=1).index
    assert index["status"].tolist() == ["ok", "ok", "blank", "ok"]


@pytest.fixture
def no_jpeg_2000(monkeypatch):
    """As where no decoder of JPEG 2000 is installed."""
    reason = "no decoder for JPEG 2000 is installed: pip install imagecodecs"
    found = headers.dicom.missing_decoder
    monkeypatch.setattr(
        headers.dicom, "missing_decoder", lambda syntax: reason if syntax == uid.JPEG2000Lossless else found(syntax)
    )


def test_missing_decoder_stops_the_build_before_it_begins(table, tmp_path, monkeypatch, no_jpeg_2000):  # D16
    plain = write_many(tmp_path / "files", 3).assign(image_id=["x", "y", "z"])
    both = pd.concat([plain, table.tail(30)])
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "prepare", None)  # nobody may call it
        with pytest.raises(DicomError, match=r"30 of 33 images: no decoder .*: pip install imagecodecs"):
            build_store(both, CONFIG, tmp_path / "store", n_jobs=1)
        before = scan_headers(both, n_jobs=1)
        patch.setattr(preprocess, "scan_headers", None)
        with pytest.raises(DicomError, match="pip install imagecodecs"):  # said by a scan that was made before
            build_store(both, CONFIG, tmp_path / "store", n_jobs=1, headers=before)
    assert store.read_index(tmp_path / "store").empty
    assert (build_store(plain, CONFIG, tmp_path / "store", n_jobs=1).index["status"] == "ok").all()


def test_only_images_that_are_still_to_do_need_a_decoder(table, tmp_path, request):
    build_store(table.head(4), CONFIG, tmp_path / "store", n_jobs=1)
    request.getfixturevalue("no_jpeg_2000")
    assert len(build_store(table.head(4), CONFIG, tmp_path / "store", n_jobs=1)) == 4


@pytest.mark.parametrize("name", ["{patient_id}/{image_id}.png", "{patient_id}_{image_id}.png"])
@pytest.mark.parametrize("beside", [True, False], ids=["in the competition", "elsewhere"])
def test_store_of_png_files(tmp_path, name, beside):
    """As others share the images, in both ways."""
    folder = tmp_path / "rsna" / "train_images"
    rows = []
    for i in range(3):
        row = {"patient_id": f"1{i}", "image_id": f"00{i}"}
        png = (folder if beside else tmp_path / "shared") / name.format(**row)
        png.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(png), phantom(i) << 4)
        rows.append({**row, "path": str(folder / row["patient_id"] / f"{row['image_id']}.dcm"), "png": png})
    table, config = pd.DataFrame(rows), PreprocessConfig(height=64, width=32, source="png")
    build = BuildConfig(png_dir="" if beside else str(tmp_path / "shared"))
    images = build_store(table, config, tmp_path / "store", n_jobs=1, image_format="raw16", build=build)
    for row, png in enumerate(table["png"]):
        np.testing.assert_array_equal(images[row], load_image(png, config))
    assert images.index["source_bytes"].tolist() == [png.stat().st_size for png in table["png"]]
    named = preprocess.sources(table, config, build)  # may be asked for before, by a notebook that shows the files
    assert named["path"].tolist() == table["png"].tolist()
    assert len(build_store(named, config, tmp_path / "store", n_jobs=1, image_format="raw16")) == 3
    assert preprocess.sources(table, CONFIG, build) is table


def test_an_error_nobody_foresaw_costs_one_image(table, tmp_path, monkeypatch):
    def odd(path, config):
        if "003" in path:
            raise OverflowError("nobody\nforesaw")
        return prepare(path, config)

    monkeypatch.setattr(jobs, "prepare", odd)
    index = build_store(table.head(6), CONFIG, tmp_path / "store", n_jobs=1).index
    assert index["status"].tolist() == ["ok", "ok", "ok", "failed", "ok", "ok"]
    assert index["reason"][3] == "OverflowError: nobody foresaw"


def test_file_over_which_a_process_is_killed_is_named(table, finished, tmp_path, monkeypatch):  # D17
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "prepare_into_store", deadly("007"))
        for _ in range(2):  # when it is alone at last, it must not take this process along
            index = build_store(table.head(12), CONFIG, tmp_path / "store", n_jobs=2).index
            assert (index["status"] == "ok").tolist() == [row != 7 for row in range(12)]
            assert "ProcessDied: the process that worked on it was killed" in index["reason"][7]
    build_store(table, CONFIG, tmp_path / "store", n_jobs=1)
    assert (tmp_path / "store" / "images.bin").read_bytes() == (finished / "images.bin").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system does not tell a process's peak of memory"
)
def test_process_takes_less_than_700_mb_on_large_images(tmp_path):
    pixels = draw_breast(np.random.default_rng(0), (4096, 3328))[0]
    codings = [(j2k(12), uid.JPEG2000Lossless), (jpeg_lossless(12), uid.JPEGLosslessSV1), ()]
    paths = [write(tmp_path / f"{i}.dcm", pixels, *coding, **WINDOW) for i, coding in enumerate(codings)]

    def peak(item):
        path, reduce = item
        prepare(path, PreprocessConfig(height=2048, width=1024, reduce=reduce))
        # What getrusage tells includes what the parent took when it started this process.
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    items = [(path, reduce) for path in paths for reduce in ("auto", 0)] * 4
    assert max(peak for _, peak in workers.over_items(peak, items, 2)) < 700e6


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
    monkeypatch.setattr(jobs, "prepare", lambda path, config: again.append(Path(path).stem) or prepare(path, config))
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
    monkeypatch.setattr(jobs, "prepare", None)  # nobody may call it
    with pytest.raises(OSError, match="store of 36 images needs") as refused:
        build_store(table, CONFIG, tmp_path / "store", n_jobs=1)
    assert refused.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_lacking_needs_room(table, tmp_path, monkeypatch):
    build_store(table.head(34), CONFIG, tmp_path / "store", n_jobs=1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, preprocess.estimate_bytes(2, CONFIG)))
    assert len(build_store(table, CONFIG, tmp_path / "store", n_jobs=1)) == 36


FULL = """
import resource, sys
import pandas as pd
from rsnakit import preprocess
table = pd.read_csv(sys.argv[1], dtype=str)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # of 36 records of 2,304 bytes
preprocess.COMMIT_S = 0
preprocess.build_store(table, preprocess.PreprocessConfig(height=64, width=32), sys.argv[2], int(sys.argv[3]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sets no such limits")
@pytest.mark.parametrize("n_jobs", [1, 2])
def test_disk_that_fills_up_stops_the_build_and_keeps_what_is_done(table, finished, tmp_path, n_jobs):
    table.to_csv(tmp_path / "table.csv", index=False)
    folder = tmp_path / "store"
    code, said = run_python(FULL, tmp_path / "table.csv", folder, n_jobs)
    assert code == 1, said
    image = re.search(rf"OSError: \[Errno {errno.EFBIG}\] {folder}: image (\d+) could not be written", said)[1]
    assert image == "013" if n_jobs == 1 else image >= "013"  # two processes are on different ones
    index = store.read_index(folder)
    assert set(index["status"]) == {"ok"} and len(index) <= 13  # nothing counts as a file that cannot be read
    assert len(index) == 13 or n_jobs > 1
    build_store(table, CONFIG, folder, n_jobs=1)
    assert (folder / "images.bin").read_bytes() == (finished / "images.bin").read_bytes()


INTERRUPTED = """
import os, signal, sys
import pandas as pd
from rsnakit import preprocess, store
table = pd.read_csv(sys.argv[1], dtype=str)
append = store.append_index
def append_and_interrupt(path, rows):
    append(path, rows)
    store.append_index = append
    os.kill(os.getpid(), signal.SIGINT)  # as of Ctrl-C, or of a notebook's button
preprocess.COMMIT_S = 0
store.append_index = append_and_interrupt
try:
    preprocess.build_store(table, preprocess.PreprocessConfig(height=64, width=32), sys.argv[2], 2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(7)  # nothing is tidied up at exit
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signal")
def test_interrupted_build_keeps_what_is_done_and_ends_its_processes(table, finished, tmp_path):  # C01
    table.to_csv(tmp_path / "table.csv", index=False)
    folder = tmp_path / "store"
    code, said = run_python(INTERRUPTED, tmp_path / "table.csv", folder)
    assert code == 7 and "interrupted" in said, said
    assert not (folder / "lock.json").exists()
    assert 1 <= len(store.read_index(folder)) < 36
    build_store(table, CONFIG, folder, n_jobs=1)
    assert (folder / "images.bin").read_bytes() == (finished / "images.bin").read_bytes()


def test_process_left_from_an_earlier_build_writes_no_more(table, tmp_path, monkeypatch):
    """Its row may belong to another image by now."""
    folder = tmp_path / "store"
    build_store(table.head(2), CONFIG, folder, n_jobs=1)
    before = (folder / "images.bin").read_bytes()
    item = (0, "02", "020", table["path"][20])
    with Lock(folder, "store"):
        job = jobs.Job(str(folder), CONFIG, "block8", jobs.read_lock(folder))
    with pytest.raises(jobs.JobError, match="lock of the job"):
        jobs.prepare_into_store(job, item)

    def taken_over_meanwhile(path, config):
        (folder / "lock.json").write_text('{"host": "another"}')
        return prepare(path, config)

    monkeypatch.setattr(jobs, "prepare", taken_over_meanwhile)
    (folder / "lock.json").write_text(job.lock)
    with pytest.raises(jobs.JobError, match="lock of the job"):
        jobs.prepare_into_store(job, item)
    assert (folder / "images.bin").read_bytes() == before


def test_second_writer_is_refused(table, tmp_path):
    with Lock(tmp_path / "store", "store"), pytest.raises(LockedError, match="store"):
        build_store(table, CONFIG, tmp_path / "store", n_jobs=1)


HOLDER = """
import sys
from rsnakit.files import Lock
with Lock(sys.argv[1], "store of another notebook"):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """A folder whose lock another process holds, and that process; it lets go once its input ends."""
    folder = tmp_path / "store"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout.readline() == "ready\n"
    yield folder, process
    process.kill()
    process.communicate()


def test_a_whole_store_is_opened_while_another_process_holds_it(table, finished, held, capsys, monkeypatch):
    """Two notebooks on the demo at once: the second one has nothing to write."""
    folder, _ = held
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    images = ensure_store(table, CONFIG, folder, RunConfig(n_jobs=1), build=True)
    assert len(images) == 36 and np.array_equal(images[7], Store(finished)[7])
    assert capsys.readouterr().out == ""
    with pytest.raises(LockedError):  # 02_preprocess is a second writer all the same
        build_store(table, CONFIG, folder, n_jobs=1)
    with pytest.raises(StoreError, match="height is 64 in the store and 96 now"):
        ensure_store(table, PreprocessConfig(height=96, width=32), folder, RunConfig(n_jobs=1), build=True)
    monkeypatch.setattr(preprocess, "file_size", lambda path: 1)
    with pytest.raises(StoreError, match="was stored from a file of"):
        ensure_store(table, CONFIG, folder, RunConfig(n_jobs=1), build=True)


@pytest.mark.parametrize("lacking", ["nothing yet", "an image", "a bad one", "pixels"])
def test_a_store_in_the_making_is_waited_for(table, finished, held, capsys, monkeypatch, lacking):
    folder, process = held
    again = 0  # images that are left to this process
    if lacking != "nothing yet":
        again = 36 if lacking == "pixels" else 1
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        if lacking == "pixels":
            (folder / "images.bin").write_bytes(bytes((folder / "images.bin").stat().st_size))
        else:
            lines = (folder / "index.csv").read_text().splitlines(keepends=True)
            bad = [] if lacking == "an image" else [lines[-1].replace(",ok,,", ",failed,cut short,")]
            (folder / "index.csv").write_text("".join(lines[:-1] + bad))
    made, waited = [], []

    def sleep(seconds):
        waited.append(seconds)
        assert not made
        if len(waited) == 3:  # the other one has made the store, or was stopped before that, and ends
            if lacking == "nothing yet":
                shutil.copytree(finished, folder, dirs_exist_ok=True)
            process.communicate()

    def prepared(path, config):
        made.append(path)
        return prepare(path, config)

    monkeypatch.setattr(preprocess.time, "sleep", sleep)
    monkeypatch.setattr(jobs, "prepare", prepared)
    images = ensure_store(table, CONFIG, folder, RunConfig(n_jobs=1), build=True)
    assert (images.index["status"] == "ok").all() and len(images) == 36
    assert len(made) == again and len(waited) == 3
    said = capsys.readouterr().out
    assert said.startswith("waiting, up to 6 h: store store: process ") and said.count("\n") == 1
    assert f"process {process.pid} on " in said and str(folder) in said
    assert not (folder / "lock.json").exists()


def test_a_store_is_not_waited_for_without_an_end_nor_for_the_dead(table, held, monkeypatch):
    folder, process = held
    monkeypatch.setattr(preprocess, "WAIT_S", 0)
    monkeypatch.setattr(preprocess, "POLL_S", 0.01)
    with pytest.raises(LockedError, match=f"process {process.pid} on"):
        ensure_store(table.head(2), CONFIG, folder, RunConfig(n_jobs=1), build=True)
    process.kill()
    process.wait()
    assert len(ensure_store(table.head(2), CONFIG, folder, RunConfig(n_jobs=1), build=True)) == 2


QUIET = """
import os, sys
from pathlib import Path
import pandas as pd
from rsnakit import preprocess
table = pd.read_csv(sys.argv[1], dtype=str)
preprocess.build_store(table, preprocess.PreprocessConfig(height=64, width=32), sys.argv[2], 2)
shared = Path("/dev/shm")
left = shared.glob(f"*{os.getpid()}*") if shared.exists() else []  # joblib's own folder may outlast it, empty
print("left:", [path.name for path in left if path.is_file() or any(path.iterdir())], flush=True)
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


def test_not_one_image_is_an_error_with_the_commonest_reason(tmp_path):
    table = write_many(tmp_path / "files", 5)
    for path in table["path"]:
        Path(path).write_text("notes on the images, " * 20)
    with pytest.raises(StoreError, match=r"not one of 5 images could be prepared. 5 times: not a DICOM file"):
        build_store(table, CONFIG, tmp_path / "store", n_jobs=1)
    assert len(store.read_index(tmp_path / "store")) == 5
    write(Path(table["path"][0]), phantom(), **WINDOW)  # and it goes on where the files are there
    assert (build_store(table, CONFIG, tmp_path / "store", n_jobs=1).index["status"] == "ok").sum() == 1


def test_what_was_put_right_in_a_file_stands_in_its_row(tmp_path):
    table = write_many(tmp_path / "files", 3)
    write(Path(table["path"][1]), phantom(1), BitsStored=None, **WINDOW)
    index = build_store(table, CONFIG, tmp_path / "store", n_jobs=1).index
    assert index["status"].tolist() == ["ok"] * 3
    assert index["reason"].tolist() == ["", "no BitsStored: taken as 16", ""]


def test_store_that_cannot_be_written_to_is_read_as_it_is(table, finished, tmp_path, monkeypatch):
    """As a data set of Kaggle's; root may write wherever a folder's mode says no, so the question is answered for it."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    before = sorted(finished.iterdir())
    images = build_store(table, CONFIG, finished, n_jobs=1)
    assert len(images) == 36 and sorted(finished.iterdir()) == before
    with pytest.raises(StoreError, match="height is 64 in the store and 96 now"):
        build_store(table, PreprocessConfig(height=96, width=32), finished, n_jobs=1)
    more = pd.concat([table, table.head(1).assign(image_id="new")], ignore_index=True)
    with pytest.raises(StoreError, match="1 of 37 images are not in it, and it cannot be written to"):
        build_store(more, CONFIG, finished, n_jobs=1)


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
    text = (
        '{"crop": true, "crop_margin": 0.02, "format": "block8", "height": 64, "reduce": "auto", "source": "dicom", '
        '"width": 32, "window": "first"}'
    )
    assert path == tmp_path / "stores" / f"rsna-64x32-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"backend": "dask"}, "address: is empty, expected that of the Dask scheduler, such as tcp://host:8786"),
        ({"address": "tcp://host:8786"}, "address: got 'tcp://host:8786' with backend 'loky'"),
        ({"backend": "threads"}, "backend: got 'threads'"),
    ],
)
def test_build_settings_that_cannot_be_meant_are_refused(settings, complaint):
    with pytest.raises(params.ParameterError, match=complaint):
        params.from_mapping(settings, BuildConfig)


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
