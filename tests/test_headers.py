"""Scanning headers: real files with known answers, written ones with odd headers, and decoders that are missing."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    DigitalMammographyXRayImageStorageForPresentation,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLosslessSV1,
)

from rsnakit import dicom, headers
from rsnakit.headers import COLUMNS, missing_decoders, refuse_missing_decoders, scan_headers, summary

REPOSITORY = Path(__file__).parents[1]
REAL = REPOSITORY.parent / "shared" / "data" / "dicom"


def table_of(paths) -> pd.DataFrame:
    return pd.DataFrame({"image_id": [path.stem for path in paths], "patient_id": "7", "path": list(paths)})


def write_header(path: Path, syntax: str = ExplicitVRLittleEndian, **elements) -> Path:
    """A file with a header and no pixels; elements as (value, ...) pairs of pydicom's keywords."""
    header = Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = syntax
    header.SOPClassUID = header.file_meta.MediaStorageSOPClassUID = DigitalMammographyXRayImageStorageForPresentation
    header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    header.Rows, header.Columns, header.BitsStored, header.PhotometricInterpretation = 40, 30, 12, "MONOCHROME1"
    for keyword, value in elements.items():
        setattr(header, keyword, value)
    header.save_as(path, enforce_file_format=True)
    return path


def test_real_files():
    if not REAL.is_dir():
        pytest.skip(f"{REAL} is not there")
    expected = json.loads((REAL / "expected.json").read_text())
    known = {name: answer for name, answer in expected.items() if answer.get("transfer_syntax")}
    headers = scan_headers(table_of([REAL / name for name in known])).set_index("image_id")
    for name, answer in known.items():
        row = headers.loc[Path(name).stem]
        assert row["transfer_syntax_uid"] == answer["transfer_syntax"], name
        assert row["photometric"] == answer["photometric"], name
        assert row["file_mb"] == (REAL / name).stat().st_size / 1e6
        if "shape" in answer:
            assert [row["rows"], row["columns"]] == answer["shape"], name
    assert headers["error"].isna().all()
    ge = headers.loc["mg_ge_sigmoid_3windows_jpll"]  # as dcmdump shows its header
    assert ge[["window_center", "window_width", "n_windows"]].tolist() == [2653, 900, 3]
    assert ge[["voi_function", "laterality", "view", "bits_stored"]].tolist() == ["SIGMOID", "R", "MLO", 12]
    assert ge["bits_allocated"] == 16 and headers.loc[
        "mg_8bit_explicit", ["bits_stored", "bits_allocated"]
    ].tolist() == [8, 8]
    assert ge["voi_lut"] and ge["transfer_syntax"] == "JPEGLosslessSV1"
    assert headers.loc["cr_modality_lut_jpll", ["window_center", "window_width"]].isna().all()
    assert headers.loc["cr_modality_lut_jpll", "n_windows"] == 0
    assert pd.isna(headers.loc["bad_no_rows", "rows"]) and headers.loc["bad_no_rows", "columns"] == 32


@pytest.mark.parametrize(
    ("centers", "widths", "first", "n"),
    [
        (["2000", "1500"], ["4000", "1000"], (2000, 4000), 2),
        (["2000", "1500", "9"], ["4000", "1000"], (2000, 4000), 2),  # D03: lists of unequal length
        ("2047.5", "4095", (2047.5, 4095), 1),
        ("2000", None, (None, None), 0),
        ("", "", (None, None), 0),
    ],
)
def test_windows(tmp_path, centers, widths, first, n):  # D03
    path = write_header(tmp_path / "a.dcm", WindowCenter=centers, WindowWidth=widths)
    row = scan_headers(table_of([path])).iloc[0]
    assert row["n_windows"] == n
    assert [None if np.isnan(row[name]) else row[name] for name in ("window_center", "window_width")] == list(first)
    assert pd.isna(row["error"])


def test_a_window_that_is_no_number_does_not_cost_the_header(tmp_path):
    path = write_header(tmp_path / "a.dcm", WindowCenter="1234.5", WindowWidth="4000")
    path.write_bytes(path.read_bytes().replace(b"1234.5", b"middle"))
    row = scan_headers(table_of([path])).iloc[0]
    assert row["n_windows"] == 0 and row["rows"] == 40 and pd.isna(row["error"])


def test_a_damaged_element_costs_itself_alone(tmp_path):
    """pydicom reads an element when it is asked for, and raises then."""
    paths = [write_header(tmp_path / f"{i}.dcm", ViewPosition="MLO", ImageLaterality="L") for i in range(3)]
    tag = b"\x18\x00\x01\x51"  # (0018,5101), ViewPosition
    paths[1].write_bytes(paths[1].read_bytes().replace(tag + b"CS", tag + b"C\xff"))
    headers = scan_headers(table_of(paths))
    assert headers["view"].fillna("?").tolist() == ["MLO", "?", "MLO"]
    assert (headers["laterality"] == "L").all() and headers["error"].isna().all()


@pytest.mark.filterwarnings("ignore")
def test_damaged_headers_are_rows(tmp_path, caplog):
    rng = np.random.default_rng(0)
    good = write_header(tmp_path / "good.dcm", WindowCenter=["2000", "1500"], WindowWidth=["4000", "900"]).read_bytes()
    paths = []
    for i in range(120):
        data = bytearray(good)
        for place in rng.integers(128, len(data), rng.integers(1, 8)):
            data[place] = rng.integers(256)
        paths.append(tmp_path / f"{i}.dcm")
        paths[-1].write_bytes(bytes(data))
    headers = scan_headers(table_of(paths))
    assert headers["image_id"].tolist() == [path.stem for path in paths]
    assert (headers["error"].notna() | headers["transfer_syntax"].notna()).all()
    assert 0 < headers["error"].notna().sum() < len(paths)


def test_png_files(tmp_path):
    Image.fromarray(np.zeros((40, 30), np.uint16)).save(tmp_path / "a.png")
    Image.fromarray(np.zeros((50, 20, 3), np.uint8)).save(tmp_path / "b.PNG", "PNG")
    (tmp_path / "c.png").write_bytes(b"\xff\xd8\xff\xe0 a picture")
    headers = scan_headers(table_of([tmp_path / name for name in ("a.png", "b.PNG", "c.png")]))
    shown = headers[["rows", "columns", "bits_stored", "bits_allocated", "photometric", "transfer_syntax"]]
    assert shown.values.tolist()[:2] == [[40, 30, 16, 16, "MONOCHROME2", "PNG"], [50, 20, 8, 8, "RGB", "PNG"]]
    assert headers["error"].notna().tolist() == [False, False, True] and "not a PNG file" in headers["error"][2]
    assert headers["file_mb"][0] == (tmp_path / "a.png").stat().st_size / 1e6
    assert headers["n_windows"].tolist()[:2] == [0, 0] and missing_decoders(headers) == ""


def test_summary_counts(tmp_path):
    lossless = {"syntax": JPEG2000Lossless, "PhotometricInterpretation": "MONOCHROME2", "BitsAllocated": 16}
    paths = [
        *(write_header(tmp_path / f"{i}.dcm", WindowCenter="9", WindowWidth="9", **lossless) for i in range(2)),
        write_header(tmp_path / "2.dcm", **lossless | {"Rows": 90, "BitsStored": 14, "VOILUTFunction": "SIGMOID"}),
        write_header(tmp_path / "3.dcm", **lossless),
        write_header(tmp_path / "4.dcm", VOILUTSequence=[Dataset()], BitsAllocated=16),
        *(tmp_path / f"{i}.dcm" for i in (5, 6, 7)),
    ]
    for path in paths[5:]:
        path.touch()
    found = summary(scan_headers(table_of(paths)))
    assert found.index.tolist() == [
        ("JPEG2000Lossless", "MONOCHROME2"), ("ExplicitVRLittleEndian", "MONOCHROME1"), ("unreadable", ""),
    ]  # fmt: skip
    assert found["images"].tolist() == [4, 1, 3] and found["share, %"].tolist() == [50, 12.5, 37.5]
    assert found["rows"].tolist()[:2] == [40, 40] and found["bits"].tolist() == ["12 of 16, 14 of 16", "12 of 16", ""]
    kinds = found[["window, %", "SIGMOID, %", "VOI LUT, %"]]
    assert kinds.values[:2].tolist() == [[50, 25, 0], [0, 0, 100]] and kinds.iloc[2].isna().all()


def test_summary_of_nothing_and_of_real_files():
    nothing = pd.DataFrame(columns=list(COLUMNS)).astype(COLUMNS)
    assert len(summary(nothing)) == 0 and "images" in summary(nothing)
    if not REAL.is_dir():
        pytest.skip(f"{REAL} is not there")
    paths = sorted(REAL.glob("*.dcm"))
    found = summary(scan_headers(table_of(paths)))
    assert found["images"].sum() == len(paths) and found["share, %"].sum() == pytest.approx(100, abs=1)
    assert found.loc[("JPEGLosslessSV1", "MONOCHROME2"), "bits"] == "12 of 16"


@pytest.mark.filterwarnings("ignore:Expected implicit VR")  # pydicom, guessing at a text file
def test_files_that_cannot_be_read_are_rows(tmp_path):
    good = write_header(tmp_path / "good.dcm")
    (tmp_path / "text.dcm").write_text("no DICOM at all\n" * 40)
    (tmp_path / "empty.dcm").touch()
    paths = [tmp_path / "text.dcm", good, tmp_path / "empty.dcm", tmp_path / "nowhere.dcm"]
    headers = scan_headers(table_of(paths))
    assert headers["error"].notna().tolist() == [True, False, True, True]
    assert "not a DICOM file" in headers["error"][0] and "empty" in headers["error"][2]
    assert "No such file" in headers["error"][3]
    assert headers["file_mb"].isna().tolist() == [False, False, False, True]
    assert headers["transfer_syntax"].notna().tolist() == [False, True, False, False]
    assert headers["image_id"].tolist() == ["text", "good", "empty", "nowhere"]


def test_sample_keeps_order_and_index(tmp_path):
    paths = [write_header(tmp_path / f"{i:03}.dcm", Rows=100 + i) for i in range(60)]
    table = table_of(paths)
    table.index += 1000
    headers = scan_headers(table, limit=20, seed=3)
    assert len(headers) == 20 and headers["image_id"].is_monotonic_increasing and headers["image_id"].is_unique
    assert headers["image_id"].tolist() == table.loc[headers.index, "image_id"].tolist()
    assert (headers["rows"] == 100 + headers["image_id"].astype(int)).all()
    assert scan_headers(table, limit=20, seed=3)["image_id"].equals(headers["image_id"])
    assert not scan_headers(table, limit=20, seed=4)["image_id"].equals(headers["image_id"])
    assert len(scan_headers(table, limit=1000)) == 60
    nothing = scan_headers(table, limit=0)
    assert len(nothing) == 0 and list(nothing.columns) == list(COLUMNS) and missing_decoders(nothing) == ""


def test_processes_give_what_one_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(headers, "FEW", 100)
    paths = [write_header(tmp_path / f"{i:03}.dcm", Rows=100 + i) for i in range(140)]
    paths[70] = tmp_path / "nowhere.dcm"
    table = table_of(paths)
    pd.testing.assert_frame_equal(scan_headers(table, n_jobs=2), scan_headers(table, n_jobs=1))


def test_missing_decoders_are_named_before_any_image_is_decoded(tmp_path):  # D16
    names = {"a": JPEGLosslessSV1, "b": JPEGLosslessSV1, "c": ExplicitVRLittleEndian, "d": JPEG2000Lossless}
    paths = [write_header(tmp_path / f"{name}.dcm", syntax) for name, syntax in names.items()]
    assert missing_decoders(scan_headers(table_of(paths))) == ""
    code = (
        "import sys, pathlib, pandas as pd\n"
        "for name in ('imagecodecs', 'PIL', 'pylibjpeg', 'gdcm'): sys.modules[name] = None  # as if not installed\n"
        "from rsnakit.headers import missing_decoders, scan_headers\n"
        f"paths = sorted(pathlib.Path({str(tmp_path)!r}).glob('*.dcm'))\n"
        "table = pd.DataFrame({'image_id': [p.stem for p in paths], 'patient_id': '7', 'path': paths})\n"
        "print(missing_decoders(scan_headers(table)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    lines = run.stdout.strip().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("2 of 4 images: ") and JPEGLosslessSV1 in lines[0]
    assert lines[1].startswith("1 of 4 images: ") and JPEG2000Lossless in lines[1]
    assert all("pip install imagecodecs" in line for line in lines)


def test_a_missing_decoder_stops_the_work(tmp_path, monkeypatch):  # D16
    paths = [write_header(tmp_path / f"{i}.dcm", JPEG2000Lossless) for i in range(3)]
    headers = scan_headers(table_of(paths))
    refuse_missing_decoders(headers, tmp_path)
    monkeypatch.setattr(dicom, "missing_decoder", lambda syntax: f"{syntax}: pip install imagecodecs")
    with pytest.raises(dicom.DicomError) as caught:
        refuse_missing_decoders(headers, tmp_path)
    assert caught.value.path == str(tmp_path)
    assert f"3 of 3 images: {JPEG2000Lossless}: pip install imagecodecs" in caught.value.cause
