"""The ways from a DICOM file to an image of a given size that are timed against each other.

Each `open_*` imports what its way needs and returns a function of a path and (height, width), which gives (height, width)
pixels, breast bright. They differ in what they do on the way, since each library is taken as its users take it:

- `rsnakit`: `preprocess.load_image` with its defaults at that size: the header's first VOI LUT or window, the breast's
  box, turned to the left, aspect kept, area averaging, 12 bits.
- `pydicom`: `dcmread`, `pixel_array` by the first decoder that pydicom finds, `apply_voi_lut`, MONOCHROME1 turned,
  smallest to largest value to 8 bits, `crop_and_resize`. `without` names plugins that are taken away first: what pydicom
  prefers depends on what is installed beside it.
- `dicomsdl`: `open` and `toPilImage`, which applies the first window as LINEAR (else smallest to largest value), turns
  MONOCHROME1 and gives 8 bits, all in C++; `crop_and_resize`. No VOI LUT, no SIGMOID.
- `monai`: `LoadImage`, whose default reader for .dcm is ITK's where ITK is installed and else pydicom's; `reader` asks for
  one by name. It gives float32 with rows and columns swapped, which is undone; smallest to largest value to 8 bits;
  `crop_and_resize`. No window, no turning of MONOCHROME1.
- `medip`: its pipeline with its default settings (smallest to largest value to 16 bits, MONOCHROME1 turned, a mask by
  Otsu's threshold) and its own crop to the mask's box; then resized. Its writing of a file is left out.
"""

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

Way = Callable[[Path, tuple[int, int]], np.ndarray]


def open_rsnakit(**settings) -> Way:
    import samples  # noqa: F401  finds the package

    from rsnakit.preprocess import PreprocessConfig, load_image

    return lambda path, size: load_image(path, PreprocessConfig(height=size[0], width=size[1], **settings))


def open_pydicom(*without: str) -> Way:
    from pydicom import dcmread, uid
    from pydicom.pixels import apply_voi_lut, get_decoder

    for syntax in (uid.JPEG2000Lossless, uid.JPEG2000, uid.JPEGLosslessSV1, uid.RLELossless):
        for plugin in set(without) & set(get_decoder(syntax).available_plugins):
            get_decoder(syntax).remove_plugin(plugin)

    def way(path: Path, size: tuple[int, int]) -> np.ndarray:
        header = dcmread(path)
        values = apply_voi_lut(header.pixel_array, header)
        if header.PhotometricInterpretation == "MONOCHROME1":
            values = values.max() - values
        return crop_and_resize(to_8_bits(values), size)

    return way


def open_dicomsdl() -> Way:
    import dicomsdl

    return lambda path, size: crop_and_resize(np.asarray(dicomsdl.open(str(path)).toPilImage()), size)


def open_monai(reader: str | None = None) -> Way:
    from monai.transforms import LoadImage

    load = LoadImage(reader=reader)

    def way(path: Path, size: tuple[int, int]) -> np.ndarray:
        values = load(path).numpy()
        return crop_and_resize(to_8_bits(values.reshape(values.shape[:2]).T), size)

    return way


def open_medip() -> Way:
    import medip
    from medip.config import CropPolicy
    from medip.pipelines import base

    kept: list[np.ndarray] = []
    base.export_image = lambda pixels, *args, **kwargs: kept.append(pixels) or Path()
    config = medip.load_default_config()
    config.roi.crop_policy = CropPolicy.BBOX
    pipeline = medip.MammographyPipeline(config=config)

    def way(path: Path, size: tuple[int, int]) -> np.ndarray:
        kept.clear()
        pipeline.process_single(path, "left-out.png")
        return cv2.resize(kept.pop(), size[::-1])

    return way


def first_decoder(path: Path, without: tuple[str, ...] = ()) -> str:
    """The plugin that pydicom asks first for a file's transfer syntax."""
    from pydicom import dcmread
    from pydicom.pixels import get_decoder

    decoder = get_decoder(dcmread(path, stop_before_pixels=True).file_meta.TransferSyntaxUID)
    # Their order is that of registration, which `available_plugins` does not keep.
    return next((plugin for plugin in decoder._available if plugin not in without), "none")


def to_8_bits(values: np.ndarray) -> np.ndarray:
    """Smallest to largest value as 0 to 255."""
    values = values - values.min()
    return (values / values.max() * 255).astype(np.uint8)


def crop_and_resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The box of the largest contour above 5 % of the largest value, at (height, width) by the default of cv2.resize.

    That default is the cheapest and aliases; averaging would take 10 to 15 ms longer on a mammogram.
    """
    _, mask = cv2.threshold(image, 0.05 * float(image.max()), 255, cv2.THRESH_BINARY)
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    left, top, width, height = cv2.boundingRect(max(contours, key=cv2.contourArea))
    return cv2.resize(image[top : top + height, left : left + width], size[::-1])
