"""The mammography machines of the demo: how each fills a frame and a header, and the DICOM file it writes."""

from dataclasses import dataclass
from pathlib import Path

import imagecodecs
import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DigitalMammographyXRayImageStorageForPresentation,
    JPEG2000Lossless,
    JPEGLosslessSV1,
    generate_uid,
)

from rsnakit.phantom import letters


@dataclass(frozen=True)
class Machine:
    """A mammography machine: its frame and the way it fills a header. Centers are for bright breasts (MONOCHROME2)."""

    site: int
    share: float  # of its site's patients
    syntax: str = JPEG2000Lossless
    aspect: float = 0.75  # width of a frame over its height
    inverted: bool = False  # MONOCHROME1
    window: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # centers and widths
    function: str | None = None  # VOILUTFunction
    gain: float = 1.0
    floor: int = 0  # value of the background
    noise: float = 1.0


MACHINES = {
    49: Machine(1, 0.60, JPEGLosslessSV1, 0.75, window=((1500.0,), (2800.0,)), function="LINEAR"),
    216: Machine(1, 0.12, JPEG2000Lossless, 0.80, window=((1600.0, 1300.0), (3000.0, 2600.0)), gain=1.1),
    210: Machine(1, 0.12, JPEGLosslessSV1, 0.75, inverted=True, window=((1400.0,), (2600.0,)), floor=25),
    170: Machine(1, 0.06, JPEG2000Lossless, 0.70, function="LINEAR_EXACT", window=((1450.0,), (2700.0,)), noise=1.3),
    190: Machine(1, 0.06, JPEGLosslessSV1, 0.78),
    93: Machine(1, 0.04, JPEG2000Lossless, 0.75, window=((2047.5,), (4095.0,)), gain=1.2),
    48: Machine(2, 0.36, JPEG2000Lossless, 0.75, window=((1300.0,), (1900.0,)), function="SIGMOID", noise=0.8),
    29: Machine(2, 0.33, JPEGLosslessSV1, 0.80, inverted=True, window=((1500.0, 1200.0), (2900.0, 2400.0)), gain=1.1),
    21: Machine(2, 0.31, JPEGLosslessSV1, 0.72, floor=60, gain=0.9),
    230: Machine(1, 0.0, JPEG2000Lossless, 0.77, window=((1700.0,), (3200.0,)), gain=1.15, noise=1.2),  # test only
}
TEST_MACHINE = 230


def finish(rng: np.random.Generator, pixels: np.ndarray, mask: np.ndarray, row: dict, machine: Machine) -> np.ndarray:
    """A machine's tone, and what stands in the picture beside the breast; (H, W) uint16, bright breast."""
    height, width = pixels.shape
    pixels = np.clip(np.rint(pixels * machine.gain) + machine.floor, 0, 4095).astype(np.uint16)
    away = slice(width - width // 25, width - width // 50)  # columns near the edge the breast is not at
    if row["oddity"] == "high_background":
        haze = 700 + rng.normal(0, 15, pixels.shape)
        pixels = np.where(mask, pixels, np.rint(haze)).astype(np.uint16)
    if row["laterality"] == "R":
        pixels = pixels[:, ::-1]
    if row["oddity"] == "bright_stripe":
        pixels[:, away] = 4095
    if row["oddity"] == "white_frame":
        border = height // 50
        pixels[:border], pixels[-border:], pixels[:, :border], pixels[:, -border:] = 4095, 4095, 4095, 4095
    if row["laterality"] == "R":
        pixels = pixels[:, ::-1]
    if row["letters"]:
        pixels = np.where(letters(row["laterality"], row["view"], pixels.shape), 4095, pixels).astype(np.uint16)
    return np.ascontiguousarray(pixels)


def write_dicom(path: Path, stored: np.ndarray, row: dict, machine: Machine, spacing: float) -> None:
    """Write stored values (H, W), 12 bits, as one DICOM file. Nothing in it depends on the clock or on this library."""
    if machine.syntax == JPEGLosslessSV1:
        coded = imagecodecs.jpeg8_encode(stored, lossless=True, predictor=1, bitspersample=12)
    else:
        coded = imagecodecs.jpeg2k_encode(
            stored, level=0, codecformat="j2k", reversible=True, bitspersample=12, numthreads=1
        )
    side = row["laterality"]
    if row["oddity"] == "wrong_laterality":
        side = "R" if side == "L" else "L"
    meta = FileMetaDataset()
    meta.FileMetaInformationVersion = b"\x00\x01"
    meta.MediaStorageSOPClassUID = DigitalMammographyXRayImageStorageForPresentation
    meta.MediaStorageSOPInstanceUID = _uid("image", row["image_id"])
    meta.TransferSyntaxUID = machine.syntax
    meta.ImplementationClassUID = _uid("rsnakit demo")
    meta.ImplementationVersionName = "RSNAKIT_DEMO"
    ds = Dataset()
    ds.file_meta = meta
    ds.SOPClassUID, ds.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    ds.StudyInstanceUID, ds.SeriesInstanceUID = _uid("study", row["patient_id"]), _uid("series", row["image_id"])
    ds.Modality, ds.PresentationIntentType = "MG", "FOR PRESENTATION"
    ds.PatientID, ds.BodyPartExamined = str(row["patient_id"]), "BREAST"
    ds.ImageLaterality, ds.ViewPosition = side, row["view"]
    ds.Rows, ds.Columns = stored.shape
    ds.SamplesPerPixel, ds.BitsAllocated, ds.BitsStored, ds.HighBit, ds.PixelRepresentation = 1, 16, 12, 11, 0
    ds.PhotometricInterpretation = "MONOCHROME1" if machine.inverted else "MONOCHROME2"
    ds.PresentationLUTShape = "INVERSE" if machine.inverted else "IDENTITY"
    ds.RescaleIntercept, ds.RescaleSlope, ds.RescaleType = 0, 1, "US"
    ds.PixelSpacing = ds.ImagerPixelSpacing = [round(spacing, 6)] * 2
    ds.LossyImageCompression = "00"
    ds.BurnedInAnnotation = "YES" if row["letters"] else "NO"
    if machine.window:
        centers, widths = machine.window
        centers = [4095 - center for center in centers] if machine.inverted else list(centers)
        ds.WindowCenter, ds.WindowWidth = (centers, list(widths)) if len(centers) > 1 else (centers[0], widths[0])
    if machine.function:
        ds.VOILUTFunction = machine.function
    ds.PixelData = encapsulate([coded])
    ds["PixelData"].VR = "OB"
    ds.save_as(path, enforce_file_format=True)


def _uid(*words) -> str:
    """The same UID for the same words."""
    return generate_uid(entropy_srcs=[str(word) for word in words])
