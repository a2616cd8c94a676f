"""Small DICOM files for the tests, written with pydicom and imagecodecs."""

import struct
from functools import partial

import imagecodecs
import numpy as np
from pydicom import uid
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate


def write(path, pixels, encode=None, syntax=uid.ExplicitVRLittleEndian, bits=12, pixel_data=None, **elements):
    """Write a one-frame file.

    `encode` makes the codestream; `pixel_data` are the bytes of the whole element instead, items and all. `elements`
    override or, given None, remove defaults.
    """
    header = Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = syntax
    header.file_meta.MediaStorageSOPClassUID = uid.DigitalMammographyXRayImageStorageForPresentation
    header.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    allocated = 8 * pixels.dtype.itemsize
    defaults = dict(
        Modality="MG",
        Rows=pixels.shape[0],
        Columns=pixels.shape[1],
        SamplesPerPixel=1,
        PhotometricInterpretation="MONOCHROME2",
        PixelRepresentation=int(pixels.dtype.kind == "i"),
        BitsAllocated=allocated,
        BitsStored=min(bits, allocated),
        HighBit=min(bits, allocated) - 1,
    )
    for keyword, value in (defaults | elements).items():
        if value is not None:
            setattr(header, keyword, value)
    is_coded = encode is not None or pixel_data is not None
    header.PixelData = pixel_data or (encapsulate([encode(pixels)]) if encode else pixels.tobytes())
    header["PixelData"].VR = "OW" if allocated > 8 or not is_coded else "OB"
    header["PixelData"].is_undefined_length = is_coded
    header.save_as(path, enforce_file_format=True)
    return path


def j2k(bits):
    return lambda pixels: imagecodecs.jpeg2k_encode(
        pixels, level=0, codecformat="j2k", reversible=True, bitspersample=bits
    )


def jpeg_lossless(bits, predictor=1):
    return lambda pixels: imagecodecs.jpeg8_encode(pixels, lossless=True, predictor=predictor, bitspersample=bits)


def jpeg(bits):
    return partial(imagecodecs.jpeg8_encode, level=100, bitspersample=bits)


htj2k = getattr(imagecodecs, "htj2k_encode", None)  # since 2025


def rle(pixels):
    """DICOM PS3.5 G: a header of 64 bytes, then a segment a byte plane, the high one first, each of an even length."""
    planes = []
    for shift in range(8 * (pixels.dtype.itemsize - 1), -1, -8):
        plane = imagecodecs.packbits_encode((pixels >> shift & 255).astype(np.uint8).tobytes())
        planes.append(plane + b"\0" * (len(plane) % 2))
    offsets = 64 + np.cumsum([0, *map(len, planes)])[:-1]
    return struct.pack("<16L", len(planes), *offsets, *[0] * (15 - len(planes))) + b"".join(planes)
