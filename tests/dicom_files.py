"""Small DICOM files for the tests, written with pydicom and imagecodecs."""

import struct

import imagecodecs
import numpy as np
from pydicom import uid
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate


def write(path, pixels, encode=None, syntax=uid.ExplicitVRLittleEndian, bits=12, **elements):
    """Write a one-frame file. `encode` makes the codestream; elements override or, given None, remove defaults."""
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
    header.PixelData = encapsulate([encode(pixels)]) if encode else pixels.tobytes()
    header["PixelData"].VR = "OW" if allocated > 8 or not encode else "OB"
    header["PixelData"].is_undefined_length = encode is not None
    header.save_as(path, enforce_file_format=True)
    return path


def j2k(bits):
    return lambda pixels: imagecodecs.jpeg2k_encode(
        pixels, level=0, codecformat="j2k", reversible=True, bitspersample=bits
    )


def jpeg_lossless(bits):
    return lambda pixels: imagecodecs.jpeg8_encode(pixels, lossless=True, predictor=1, bitspersample=bits)


def rle(pixels):
    """DICOM PS3.5 G: a header of 64 bytes, then a segment a byte plane, the high one first."""
    planes = [imagecodecs.packbits_encode((pixels >> shift & 255).astype(np.uint8).tobytes()) for shift in (8, 0)]
    return struct.pack("<16L", 2, 64, 64 + len(planes[0]), *[0] * 13) + b"".join(planes)
