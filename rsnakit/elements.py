"""What single elements of a DICOM header say, read so that a malformed one costs no more than itself."""

from __future__ import annotations

import logging

import numpy as np
import pydicom
from pydicom import uid

logger = logging.getLogger(__name__)


def transfer_syntax(header: pydicom.Dataset) -> str:
    """The transfer syntax UID of a header; where there is none, that of uncompressed data encoded as the header is."""
    if stated := getattr(header, "file_meta", {}).get("TransferSyntaxUID"):
        return str(stated)
    implicit, little = getattr(header, "original_encoding", (True, True))
    if little is False:
        return str(uid.ExplicitVRBigEndian)
    return str(uid.ExplicitVRLittleEndian if implicit is False else uid.ImplicitVRLittleEndian)


def header_numbers(header: pydicom.Dataset, keyword: str) -> tuple[float, ...]:
    """Finite numbers of a decimal string element; () where it is absent, empty or unreadable."""
    try:
        value = header.get(keyword)
        if value is None or value == "":
            return ()
        numbers = tuple(float(number) for number in np.atleast_1d(np.asarray(value, dtype=object)))
        if not np.isfinite(numbers).all():
            raise ValueError(f"{numbers}")
        return numbers
    except Exception as error:
        log(header, f"unreadable {keyword} passed over: {' '.join(str(error).split())}")
        return ()


def header_integer(header: pydicom.Dataset, keyword: str) -> int | None:
    """A whole number that decoding cannot do without; None where it is absent or empty. Raises ValueError if it is none."""
    try:
        value = header.get(keyword)
    except Exception as error:
        raise ValueError(f"{keyword} cannot be read: {type(error).__name__}: {str(error)[:80]}") from error
    if value is None or value == "":
        return None
    try:
        if int(value) == float(value):
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{keyword} is {str(value)[:40]!r}: expected a whole number")


def photometric(header: pydicom.Dataset) -> str:
    return str(header.get("PhotometricInterpretation", "")).strip(" \0").upper()


def log(header: pydicom.Dataset, message: str) -> None:
    logger.warning("%s: %s", getattr(header, "filename", None) or "a header", message)
