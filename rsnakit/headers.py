"""What the headers of a competition say, before any pixel is decoded: sizes, encodings, windows, missing decoders."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
from pydicom import uid
from pydicom.dataset import Dataset
from tqdm.auto import tqdm

from rsnakit import dicom, env, png
from rsnakit.elements import log
from rsnakit.workers import ProcessDied, over_items

FEW = 2000  # starting processes takes longer than reading so many headers
CHUNK = 32  # headers a process gets at a time; one takes less than a millisecond
COLUMNS = {
    "image_id": "object", "patient_id": "object", "transfer_syntax": "object", "transfer_syntax_uid": "object",
    "photometric": "object", "rows": "Int64", "columns": "Int64", "bits_stored": "Int64", "bits_allocated": "Int64",
    "frames": "Int64", "window_center": "float64", "window_width": "float64", "n_windows": "Int64",
    "voi_function": "object", "voi_lut": "boolean", "laterality": "object", "view": "object", "file_mb": "float64",
    "error": "object",
}  # fmt: skip


def scan_headers(table: pd.DataFrame, n_jobs: int = 0, limit: int | None = None, seed: int = 0) -> pd.DataFrame:
    """Read the headers of a table's images, no pixels.

    Args:
        table: a row an image: image_id, patient_id and path, as `data.load_table` gives it. Paths may lead to PNG files.
        n_jobs: processes; 0 means all cores. A few files are read without starting any.
        limit: read only so many images, drawn at random with `seed`; None reads all.

    Returns:
        A row an image, in the table's order and on its index; what a header doesn't say is missing.

        - transfer_syntax: pydicom's short name (JPEG2000Lossless), and transfer_syntax_uid. PNG files have PNG and none.
        - photometric (MONOCHROME1 or 2), rows, columns (pixels), bits_stored, bits_allocated, frames, laterality, view: as
          the header has them.
        - window_center, window_width: the first pair, in stored units after rescale; n_windows: how many pairs.
        - voi_function: VOILUTFunction; voi_lut: whether there is a VOI LUT Sequence, which goes before a window.
        - file_mb: size in 10^6 bytes.
        - error: why a file cannot be read, missing ones too; missing where it can.
    """
    if limit is not None and limit < len(table):
        chosen = np.random.default_rng(seed).choice(len(table), max(limit, 0), replace=False)
        table = table.iloc[np.sort(chosen)]
    files = list(zip(table.index, table["image_id"], table["patient_id"], table["path"], strict=True))
    done = over_items(_row, files, 1 if len(files) < FEW else n_jobs or env.cores(), chunk=CHUNK)
    rows = {}
    for (label, image_id, patient_id, _), row in tqdm(
        done, total=len(files), unit="file", desc="headers", mininterval=1
    ):
        died = {"image_id": image_id, "patient_id": patient_id, "error": str(row)}
        rows[label] = died if isinstance(row, ProcessDied) else row
    ordered = [rows[label] for label in table.index]
    return pd.DataFrame(ordered, index=table.index, columns=list(COLUMNS)).astype(COLUMNS)


def missing_decoders(headers: pd.DataFrame) -> str:
    """What to install before the images of a scan can be decoded: a line a transfer syntax, "" if nothing is missing.

    A transfer syntax that no package decodes costs the files that claim it, each by its name, and is not listed.

    Args:
        headers: as `scan_headers` gives it.
    """
    counts = headers["transfer_syntax_uid"].value_counts()
    reasons = {syntax: dicom.missing_decoder(syntax) for syntax in counts.index}
    helped = {syntax: reason for syntax, reason in reasons.items() if reason and "pip install" in reason}
    lines = [f"{counts[syntax]:,} of {len(headers):,} images: {reason}" for syntax, reason in helped.items()]
    return "\n".join(lines)


def refuse_missing_decoders(headers: pd.DataFrame, where: str | os.PathLike) -> None:
    """Stops before the work begins where some of the images of a scan cannot be decoded here.

    Args:
        headers: as `scan_headers` gives it.
        where: what was scanned, for the message.

    Raises:
        rsnakit.dicom.DicomError: with a line for each such transfer syntax and the pip command that helps.
    """
    if lines := missing_decoders(headers):
        raise dicom.DicomError(where, f"decoders are missing, nothing was begun\n{lines}")


def summary(headers: pd.DataFrame) -> pd.DataFrame:
    """What a scan says in a few lines: a row for each transfer syntax and photometric interpretation, the commonest first.

    Args:
        headers: as `scan_headers` gives it.

    Returns:
        images, and their share of all in %; rows, columns and MB of a file (medians); bits, as stored of allocated, such as
        "12 of 16"; shares in % of images with a window, with a SIGMOID one and with a VOI LUT. Files that cannot be read
        are counted in a row of their own, and what their headers would have said is missing there.
    """
    bad = headers["error"].notna()
    shares = {
        "window, %": headers["n_windows"].fillna(0) > 0,
        "SIGMOID, %": headers["voi_function"] == "SIGMOID",
        "VOI LUT, %": headers["voi_lut"].fillna(False),
    }
    said = (
        headers[["rows", "columns", "file_mb"]]
        .astype("float64")
        .assign(
            transfer_syntax=headers["transfer_syntax"].fillna("not said").mask(bad, "unreadable"),
            photometric=headers["photometric"].fillna("not said").mask(bad, ""),
            bits=headers["bits_stored"].astype("string") + " of " + headers["bits_allocated"].astype("string"),
            **{name: (100 * share.astype("float64")).mask(bad) for name, share in shares.items()},
        )
    )
    groups = said.groupby(["transfer_syntax", "photometric"])
    images = groups.size()
    bits = groups["bits"].agg(lambda values: ", ".join(sorted(values.dropna().unique())))
    columns = {"images": images, "share, %": 100 * images / max(len(headers), 1), "bits": bits}
    medians = groups[["rows", "columns", "file_mb"]].median().rename(columns={"file_mb": "MB"})
    result = pd.concat([pd.DataFrame(columns), medians, groups[list(shares)].mean()], axis=1).round(1)
    unreadable = result.index.get_level_values("transfer_syntax") == "unreadable"
    return result.iloc[np.lexsort((-result["images"], unreadable))]


def _row(file: tuple) -> dict:
    """The row of one file: its label in the table, image_id, patient_id and path."""
    _, image_id, patient_id, path = file
    row = {"image_id": image_id, "patient_id": patient_id}
    try:
        row["file_mb"] = os.path.getsize(path) / 1e6 if os.path.exists(path) else None
        if Path(path).suffix.lower() == ".png":
            return row | _png_fields(png.read_header(path))
        return row | _fields(dicom.read_header(path))
    except dicom.DicomError as error:
        return row | {"error": error.cause}
    except Exception as error:  # pydicom reads elements when they are asked for, and damaged ones fail in many ways
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _png_fields(header: png.PngHeader) -> dict:
    photometric = {2: "RGB", 3: "PALETTE COLOR", 6: "RGB"}.get(header.color, "MONOCHROME2")
    sizes = {"rows": header.rows, "columns": header.columns, "bits_stored": header.bits, "bits_allocated": header.bits}
    return {"transfer_syntax": "PNG", "photometric": photometric, "frames": 1, "n_windows": 0, "voi_lut": False} | sizes


def _fields(header: Dataset) -> dict:
    syntax = dicom.transfer_syntax(header)
    pairs = list(
        zip(dicom.header_numbers(header, "WindowCenter"), dicom.header_numbers(header, "WindowWidth"), strict=False)
    )
    center, width = pairs[0] if pairs else (None, None)
    sizes = {name: _number(header, keyword) for name, keyword in _NUMBERS.items()}
    words = {name: _text(header, keyword) for name, keyword in _WORDS.items()}
    windows = {"window_center": center, "window_width": width, "n_windows": len(pairs)}
    return {
        "transfer_syntax": uid.UID(syntax).keyword or syntax,
        "transfer_syntax_uid": syntax,
        "voi_lut": bool(_value(header, "VOILUTSequence")),
    } | (sizes | words | windows)


_NUMBERS = {
    "rows": "Rows",
    "columns": "Columns",
    "bits_stored": "BitsStored",
    "bits_allocated": "BitsAllocated",
    "frames": "NumberOfFrames",
}
_WORDS = {
    "photometric": "PhotometricInterpretation",
    "voi_function": "VOILUTFunction",
    "laterality": "ImageLaterality",
    "view": "ViewPosition",
}


def _number(header: Dataset, keyword: str) -> int | None:
    numbers = dicom.header_numbers(header, keyword)
    return int(numbers[0]) if numbers else None


def _text(header: Dataset, keyword: str) -> str | None:
    return str(_value(header, keyword) or "").strip().upper() or None


def _value(header: Dataset, keyword: str) -> object:
    try:
        return header.get(keyword)
    except Exception as error:
        log(header, f"unreadable {keyword} passed over: {' '.join(str(error).split())}")
        return None
