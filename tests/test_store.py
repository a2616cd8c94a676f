"""rsnakit.store: what comes back, what counts after a kill, and what is refused. The formats are in test_store_formats.py."""

import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from rsnakit import store
from rsnakit.store import INDEX_COLUMNS, Store, StoreError

SETTINGS = {"height": 40, "width": 24, "window": "first", "crop": True, "crop_margin": 0.02}
SHAPE = (40, 24)
EXACT = ("block8", "raw16", "png16")  # on pictures with as much background as `picture`
BINARY, PNG = ("block8", "raw16"), ("png16", "png8")


def picture(seed: int) -> np.ndarray:
    """(40, 24) uint16 up to 4095: a breast of noise on a ramp at the left, background at the right."""
    rng = np.random.default_rng(seed)
    image = np.zeros(SHAPE, np.uint16)
    image[:, :12] = np.clip(np.linspace(0, 3800, 480).reshape(40, 12) + rng.normal(0, 150, (40, 12)), 0, 4095)
    image[0, :5] = 0, 4095, 1, 4094, 2048
    return image


def check(image: np.ndarray, seed: int, image_format: str) -> None:
    """An image is the picture of a seed, as near as its format brings it."""
    assert type(image) is np.ndarray and image.dtype == np.uint16 and image.shape == SHAPE
    expected = picture(seed).astype(int)
    if image_format == "png8":
        assert np.abs(image - expected).max() <= 4095 / 255 / 2 + 0.5
    else:
        np.testing.assert_array_equal(image, expected)


def row(number: int, image_id: str, status: str = "ok", reason: str = "") -> dict:
    zeros = dict.fromkeys(INDEX_COLUMNS, 0)
    return {**zeros, "row": number, "patient_id": "007", "image_id": image_id, "status": status, "reason": reason,
            "flipped": number % 2 == 1}  # fmt: skip


def write(path, number: int, image_format: str) -> None:
    store.write_image(path, image_format, number, "007", f"010{number}", picture(number))


def make(path, image_format="raw16", numbers=(0, 1, 2)) -> Path:
    """A store of pictures; image 1 has failed."""
    index = store.open_for_writing(path, SETTINGS, image_format, SHAPE, {"rsnakit": "0"})
    assert len(index) == 0
    for number in numbers:
        if number == 1:
            store.append_index(path, [row(1, "0101", "failed", 'a.dcm: cut, "short"')])
        else:
            write(path, number, image_format)
            store.append_index(path, [row(number, f"010{number}")])
    return path


def reopen(path, image_format="raw16"):
    return store.open_for_writing(path, SETTINGS, image_format, SHAPE, {})


def content(path: Path) -> dict[str, bytes]:
    """All that a store's folder holds."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def place(path: Path, number: int, image_format: str) -> Path:
    """The file that has an image's pixels."""
    return path / "images.bin" if image_format in BINARY else path / "images" / "007" / f"010{number}.png"


@pytest.mark.parametrize("image_format", store.FORMATS)
def test_images_come_back_from_every_format(tmp_path, image_format):
    opened = Store(make(tmp_path, image_format))
    assert len(opened) == 3 and opened.shape == SHAPE
    for number in (0, 2):
        check(opened[number], number, image_format)
    assert opened.index["image_id"].tolist() == ["0100", "0101", "0102"]
    assert opened.index["patient_id"].tolist() == ["007"] * 3
    assert opened.index["flipped"].tolist() == [False, True, False]
    assert opened.index["reason"].tolist() == ["", 'a.dcm: cut, "short"', ""]
    assert opened.manifest["preprocess"] == SETTINGS and opened.manifest["format"] == image_format
    assert opened.manifest["hash"] == store.config_hash(SETTINGS)
    opened[0][:] = 0  # what is given out is a copy
    check(opened[0], 0, image_format)


@pytest.mark.parametrize("image_format", store.FORMATS)
def test_image_without_pixels_is_refused_by_name(tmp_path, image_format):
    opened = Store(make(tmp_path, image_format))
    with pytest.raises(StoreError, match=r"0101.*failed.*a\.dcm: cut"):
        opened[1]
    for outside in (3, -1):
        with pytest.raises(IndexError, match=str(outside)):
            opened[outside]


def test_rows_of_finds_images_and_names_what_is_missing(tmp_path):
    opened = Store(make(tmp_path))
    assert opened.rows_of(["0102", "0100"]).tolist() == [2, 0]
    with pytest.raises(StoreError, match=r"2 of 3 images.*'101'.*'9'"):
        opened.rows_of(["101", "0100", "9"])


@pytest.mark.parametrize("image_format", store.FORMATS)
def test_rows_of_an_unfinished_store_are_not_mixed_up(tmp_path, image_format):
    """A kill in the middle leaves gaps, since processes finish out of turn."""
    opened = Store(make(tmp_path, image_format, numbers=(6, 2)))
    assert opened.rows_of(["0106", "0102"]).tolist() == [1, 0]
    for number in (2, 6):
        check(opened[int(opened.rows_of([f"010{number}"])[0])], number, image_format)


def _sums(opened: Store, rows: list[int]) -> list[int]:
    return [int(opened[number].sum()) for number in rows]


@pytest.fixture(scope="module")
def three_processes():
    """Started anew, so that they know of a store what they are given; the start is most of their time, so once for all."""
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        yield pool


@pytest.mark.parametrize("image_format", EXACT)
def test_goes_to_workers_without_its_images(three_processes, tmp_path, image_format):
    opened = Store(make(tmp_path, image_format, numbers=(0, 1, 2, 3, 4, 5, 6)))
    expected = [int(picture(number).sum()) for number in (0, 2)]
    assert _sums(opened, [0, 2]) == expected  # the map is open now
    assert len(pickle.dumps(opened)) < 6000 < 6 * SHAPE[0] * SHAPE[1] * 9 // 8
    assert three_processes.apply(_sums, (opened, [0, 2])) == expected


@pytest.mark.parametrize("image_format", store.FORMATS)
def test_line_that_a_kill_cut_short_does_not_count(tmp_path, image_format):  # C01
    make(tmp_path, image_format)
    whole = (tmp_path / "index.csv").read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for end in (last + 1, last + 10, len(whole) - 1):
        (tmp_path / "index.csv").write_bytes(whole[:end])
        assert Store(tmp_path).index["image_id"].tolist() == ["0100", "0101"]
    assert reopen(tmp_path, image_format)["row"].tolist() == [0, 1]
    store.append_index(tmp_path, [row(2, "0102")])
    assert (tmp_path / "index.csv").read_bytes() == whole


def test_later_line_of_a_row_wins(tmp_path):
    make(tmp_path)
    write(tmp_path, 1, "raw16")
    store.append_index(tmp_path, [row(1, "0101")])
    for _ in range(2):  # and when the index is written anew
        opened = Store(tmp_path)
        assert opened.index["status"].tolist() == ["ok"] * 3 and opened.index["row"].tolist() == [0, 1, 2]
        check(opened[1], 1, "raw16")
        reopen(tmp_path)


def test_an_index_without_content_is_read_and_gone_on_with(tmp_path):
    """As older versions wrote it: of its images the content is not known, of those that follow it is."""
    make(tmp_path, numbers=(0, 1))
    lines = (tmp_path / "index.csv").read_text().splitlines()
    assert lines[0] == ",".join(INDEX_COLUMNS) and lines[0].endswith(",content")
    old = "\n".join(line.rsplit(",", 1)[0] for line in lines) + "\n"
    (tmp_path / "index.csv").write_text(old)
    opened = Store(tmp_path)
    assert opened.index["image_id"].tolist() == ["0100", "0101"] and opened.index["content"].tolist() == ["", ""]
    check(opened[0], 0, "raw16")
    assert (tmp_path / "index.csv").read_text() == old  # reading changes nothing

    assert reopen(tmp_path)["row"].tolist() == [0, 1]
    write(tmp_path, 2, "raw16")
    store.append_index(tmp_path, [{**row(2, "0102"), "content": "00e4567890123456"}])
    for _ in range(2):
        index = Store(tmp_path).index
        assert index["image_id"].tolist() == ["0100", "0101", "0102"]
        assert index["content"].tolist() == ["", "", "00e4567890123456"]  # text, and no number
        reopen(tmp_path)


def test_an_index_of_other_columns_is_refused(tmp_path):
    make(tmp_path)
    text = (tmp_path / "index.csv").read_text()
    for header in (",".join(INDEX_COLUMNS[1:]), ",".join(INDEX_COLUMNS[:-2]), ",".join(INDEX_COLUMNS) + ",more"):
        (tmp_path / "index.csv").write_text(text.replace(text.split("\n", 1)[0], header, 1))
        with pytest.raises(StoreError, match=r"index\.csv: not the index of a store"):
            Store(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("height", 64), ("window", "none"), ("crop_margin", 0.1), ("crop", False), ("format", "block8")]
)
def test_other_settings_are_refused_with_both_values(tmp_path, name, value):  # P03
    make(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    wanted = {**SETTINGS, "format": "raw16", name: value}
    old = {**SETTINGS, "format": "raw16"}[name]
    with pytest.raises(StoreError) as refused:
        store.open_for_writing(tmp_path, {k: wanted[k] for k in SETTINGS}, wanted["format"], SHAPE, {})
    assert f"other settings: {name} is {old!r} in the store and {value!r} now." in str(refused.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_setting_that_only_one_side_knows_is_refused(tmp_path):  # P03
    make(tmp_path)
    manifest = store.read_manifest(tmp_path)
    known = {**SETTINGS, "format": "raw16"}
    store.check_settings(manifest, known, tmp_path)
    with pytest.raises(StoreError, match="sharpen is 'not set' in the store and True now"):
        store.check_settings(manifest, {**known, "sharpen": True}, tmp_path)
    del known["crop"]
    with pytest.raises(StoreError, match="crop is True in the store and 'not set' now"):
        store.check_settings(manifest, known, tmp_path)


def test_hash_is_that_of_the_settings_in_any_order():
    turned = dict(reversed(SETTINGS.items()))
    assert store.config_hash(SETTINGS) == store.config_hash(turned)
    assert store.config_hash(SETTINGS) != store.config_hash({**SETTINGS, "height": 41})


def test_folders_that_are_no_store_are_refused(tmp_path):
    with pytest.raises(StoreError, match="no image store here"):
        Store(tmp_path)
    (tmp_path / "images.bin").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"no manifest\.json"):
        store.open_for_writing(tmp_path, SETTINGS, "raw16", SHAPE, {})
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "zarr"}))
    with pytest.raises(StoreError, match=r"'zarr'.*block8, raw16, png16, png8"):
        Store(tmp_path)
    with pytest.raises(StoreError, match="'jpeg'"):
        store.open_for_writing(tmp_path / "new", SETTINGS, "jpeg", SHAPE, {})
    (tmp_path / "pictures" / "images").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"no manifest\.json"):
        store.open_for_writing(tmp_path / "pictures", SETTINGS, "png16", SHAPE, {})


def test_block8_of_another_layout_is_refused(tmp_path):
    """An older version's runs of pixels would be read as tiles: a scrambled image, and no error."""
    for image_format, readable in (("block8", False), ("raw16", True)):
        path = make(tmp_path / image_format, image_format)
        manifest = store.read_manifest(path)
        for layout in (1, 3):
            (path / "manifest.json").write_text(json.dumps({**manifest, "layout": layout}))
            if readable:
                check(Store(path)[0], 0, image_format)
                continue
            for use in (Store, lambda path: reopen(path, "block8")):
                with pytest.raises(StoreError, match=f"laid out in way {layout} and this version reads way 2"):
                    use(path)


@pytest.mark.parametrize("image_format", BINARY)
@pytest.mark.parametrize("lost", [1, -1, 10**9])  # bytes; -1: a whole record
def test_copy_without_all_images_is_found_out_and_completed(tmp_path, image_format, lost):
    make(tmp_path, image_format)
    whole = content(tmp_path)
    size = len(whole["images.bin"])
    with open(tmp_path / "images.bin", "rb+") as f:
        f.truncate(max(0, size - (size // 3 if lost < 0 else lost)))
    left = 2 if lost < 10**9 else 0
    with pytest.raises(
        StoreError, match=f"images.bin holds {left} whole images and the index goes up to 3.*02_preprocess"
    ):
        Store(tmp_path)
    assert reopen(tmp_path, image_format)["row"].tolist() == ([0, 1] if left else [1])
    write(tmp_path, 0, image_format)
    write(tmp_path, 2, image_format)
    store.append_index(tmp_path, [row(number, f"010{number}") for number in (0, 2)])
    check(Store(tmp_path)[2], 2, image_format)
    assert (tmp_path / "images.bin").read_bytes() == whole["images.bin"]


@pytest.mark.parametrize("image_format", store.FORMATS)
def test_missing_files_are_found_out_and_made_again(tmp_path, image_format, caplog):
    make(tmp_path, image_format)
    whole = content(tmp_path)
    place(tmp_path, 2, image_format).unlink()
    if image_format in BINARY:
        with pytest.raises(StoreError, match="holds 0 whole images"):
            Store(tmp_path)
    else:
        opened = Store(tmp_path)  # the files are looked for when they are asked for
        check(opened[0], 0, image_format)
        with pytest.raises(
            StoreError, match=r"image 0102 \(patient 007\): there is no .*0102\.png.*'2,'.*02_preprocess"
        ):
            opened[2]
    with caplog.at_level(logging.WARNING):
        kept = reopen(tmp_path, image_format)
    assert "0102" in caplog.text
    assert kept["row"].tolist() == ([1] if image_format in BINARY else [0, 1])
    for number in (0, 2):
        write(tmp_path, number, image_format)
    assert {name: data for name, data in content(tmp_path).items() if name != "index.csv"} == {
        name: data for name, data in whole.items() if name != "index.csv"
    }


def test_png_store_without_its_folder_is_refused_at_once(tmp_path):
    make(tmp_path, "png16")
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="no folder images and the index goes up to 3"):
        Store(tmp_path)
    assert reopen(tmp_path, "png16")["row"].tolist() == [1]


@pytest.mark.parametrize("image_format", BINARY)
def test_hole_in_the_file_does_not_read_as_a_black_image(tmp_path, image_format, caplog):
    """A record that was never written is zeros of the right size: a copy lost it, or the disk lost power."""
    make(tmp_path, image_format, numbers=(0, 2, 3))
    whole = (tmp_path / "images.bin").read_bytes()
    size = len(whole) // 4
    with open(tmp_path / "images.bin", "rb+") as f:
        f.seek(2 * size)
        f.write(bytes(size))
    opened = Store(tmp_path)
    rows = opened.rows_of(["0100", "0102", "0103"])
    check(opened[int(rows[0])], 0, image_format)
    check(opened[int(rows[2])], 3, image_format)
    with pytest.raises(StoreError, match=r"image 0102 \(patient 007\).*never written.*'2,'.*02_preprocess"):
        opened[int(rows[1])]
    assert reopen(tmp_path, image_format)["row"].tolist() == [0, 3]
    assert "1 images that index.csv names" in caplog.text and "0102" in caplog.text
    write(tmp_path, 2, image_format)
    store.append_index(tmp_path, [row(2, "0102")])
    assert (tmp_path / "images.bin").read_bytes() == whole
    caplog.clear()
    assert len(reopen(tmp_path, image_format)) == 3 and not caplog.text


def test_end_that_a_copy_lost_is_made_again(tmp_path):
    """A file made at its full size and filled from the front, as some copies are, which ends within a record. In raw16,
    where any number is a pixel, the half record cannot be told from a dark image."""
    make(tmp_path, "block8", numbers=(0, 2, 3))
    whole = (tmp_path / "images.bin").read_bytes()
    size = len(whole) // 4
    kept = 2 * size + size // 3
    (tmp_path / "images.bin").write_bytes(whole[:kept] + bytes(len(whole) - kept))
    with pytest.raises(StoreError, match=r"0102.*steps are 0"):
        Store(tmp_path)[1]
    assert reopen(tmp_path, "block8")["row"].tolist() == [0]


def test_dark_middle_of_a_raw_record_is_no_hole(tmp_path):
    """The lines that are looked at first may be black in an image that is not."""
    image = np.zeros((400, 24), np.uint16)
    image[3, 5] = 9
    store.open_for_writing(tmp_path, {**SETTINGS, "height": 400}, "raw16", (400, 24), {})
    store.write_image(tmp_path, "raw16", 0, "007", "0100", image)
    store.append_index(tmp_path, [row(0, "0100")])
    assert len(store.open_for_writing(tmp_path, {**SETTINGS, "height": 400}, "raw16", (400, 24), {})) == 1


@pytest.mark.parametrize("image_format", PNG)
@pytest.mark.parametrize("damage", ["cut", "empty", "flipped bit", "other size", "other depth", "colour", "not a PNG"])
def test_damaged_or_foreign_png_is_refused_by_name(tmp_path, image_format, damage):
    opened = Store(make(tmp_path, image_format))
    file = place(tmp_path, 2, image_format)
    data = bytearray(file.read_bytes())
    pixels = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
    if damage == "cut":
        data = data[: len(data) * 2 // 3]
    elif damage == "empty":
        data = b""
    elif damage == "flipped bit":
        data[len(data) // 2] ^= 4
    elif damage == "not a PNG":
        data = b"pixels"
    else:
        other = {
            "other size": np.ones((24, 40), pixels.dtype), "colour": np.ones((*SHAPE, 3), pixels.dtype),
            "other depth": np.ones(SHAPE, np.uint8 if image_format == "png16" else np.uint16),
        }[damage]  # fmt: skip
        data = cv2.imencode(".png", other)[1].tobytes()
    file.write_bytes(data)
    with pytest.raises(
        StoreError, match=r"image 0102 \(patient 007\): .*(no whole PNG|expected \(40, 24\)).*02_preprocess"
    ):
        opened[2]
    check(opened[0], 0, image_format)
    assert reopen(tmp_path, image_format)["row"].tolist() == ([0, 1] if damage == "empty" else [0, 1, 2])


def test_file_that_shrinks_under_an_open_store_is_named(tmp_path):
    opened = Store(make(tmp_path))
    os.truncate(tmp_path / "images.bin", (tmp_path / "images.bin").stat().st_size // 3)
    with pytest.raises(StoreError, match=r"0102.*images\.bin was cut to 1"):
        opened[2]


@pytest.mark.parametrize("image_format", EXACT)
def test_store_opened_during_a_build_reads_what_was_committed_then(tmp_path, image_format):
    make(tmp_path, image_format, numbers=(0,))
    early = Store(tmp_path)
    check(early[0], 0, image_format)
    write(tmp_path, 1, image_format)  # on the disk, and in no index yet
    assert len(Store(tmp_path)) == 1
    store.append_index(tmp_path, [row(1, "0101")])
    write(tmp_path, 2, image_format)
    late = Store(tmp_path)
    for number in (0, 1):
        check(late[number], number, image_format)
    assert len(early) == 1 and len(late) == 2
    check(early[0], 0, image_format)


def write_some(path: Path, image_format: str, numbers: list[int]) -> None:
    for number in numbers:
        write(path, number, image_format)


@pytest.mark.parametrize("image_format", store.FORMATS)
def test_processes_that_write_at_once_give_what_one_gives(three_processes, tmp_path, image_format):
    """Rows of three processes lie between each other's, and some are written by two."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for path in (alone, together):
        reopen(path, image_format)
    write_some(alone, image_format, list(range(60)))
    shares = [list(range(0, 60, 3)), [*range(1, 60, 3), *range(0, 60, 9)], [*range(59, 0, -3), *range(1, 60, 6)]]
    three_processes.starmap(write_some, [(together, image_format, share) for share in shares], chunksize=1)
    assert content(together) == content(alone)
    store.append_index(together, [row(number, f"010{number}") for number in range(60)])
    opened = Store(together)
    for number in range(60):
        check(opened[number], number, image_format)


WRITES_ON = """
import sys
from pathlib import Path
import numpy as np
from rsnakit import store
path, image_format = Path(sys.argv[1]), sys.argv[2]
image = np.full((2048, 1024), 9, np.uint16)
image[:, :512] = np.random.default_rng(0).integers(0, 4096, (2048, 512))
row = dict.fromkeys(store.INDEX_COLUMNS, 0)
store.open_for_writing(path, {}, image_format, image.shape, {})
store.write_image(path, image_format, 0, "7", "0", image)
store.append_index(path, [{**row, "patient_id": "7", "image_id": "0", "status": "ok", "reason": ""}])
print("one", flush=True)
while True:
    for number in range(1, 6):
        store.write_image(path, image_format, number, "7", str(number), image)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.parametrize("image_format", store.FORMATS)
def test_killed_writer_leaves_nothing_that_counts(tmp_path, image_format):  # C01
    with subprocess.Popen(
        [sys.executable, "-c", WRITES_ON, tmp_path, image_format], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
    ) as writer:
        assert writer.stdout.readline() == b"one\n"
        time.sleep(0.15)
        writer.send_signal(signal.SIGKILL)
    opened = Store(tmp_path)
    assert opened.index["image_id"].tolist() == ["0"]
    first = opened[0]
    assert store.open_for_writing(tmp_path, {}, image_format, first.shape, {})["image_id"].tolist() == ["0"]
    for number in range(1, 6):
        store.write_image(tmp_path, image_format, number, "7", str(number), first)
    zeros = dict.fromkeys(INDEX_COLUMNS, 0)
    rows = [
        {**zeros, "row": n, "patient_id": "7", "image_id": str(n), "status": "ok", "reason": ""} for n in range(1, 6)
    ]
    store.append_index(tmp_path, rows)
    opened = Store(tmp_path)
    for number in range(6):
        np.testing.assert_array_equal(opened[number], first)
    assert not list(tmp_path.rglob(".*.tmp"))  # what it had begun is cleared by the next writer of the same image


def test_empty_store(tmp_path):
    for image_format in store.FORMATS:
        path = tmp_path / image_format
        reopen(path, image_format)
        opened = Store(path)
        assert len(opened) == 0 and list(opened.index.columns) == list(INDEX_COLUMNS)
        assert opened.rows_of([]).shape == (0,)
        assert len(reopen(path, image_format)) == 0
