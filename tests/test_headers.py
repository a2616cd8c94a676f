"""Scanning headers: real files with known answers, written ones with odd headers, and decoders that are missing."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    DigitalMammographyXRayImageStorageForPresentation,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLosslessSV1,
)

from rsnakit.headers import COLUMNS, missing_decoders, scan_headers

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


def test_processes_give_what_one_gives(tmp_path):
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
