"""Where in an image a model finds what speaks for cancer: Grad-CAM (Selvaraju et al., ICCV 2017), as captum computes it.

The maps that a model pools are weighted by what the cancer logit makes of them, and what is above zero is shown. Such a
picture is as coarse as these maps, of which a place is 32 pixels wide with most models; and it says where evidence was
found, not that it is right.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from rsnakit import runs
from rsnakit.metrics import BREAST
from rsnakit.models import CancerNet, load_model
from rsnakit.store import Store
from rsnakit.store_formats import MAX_VALUE
from rsnakit.targets import view_ids


def heatmap(model: CancerNet, images: Sequence[np.ndarray], view_id: Sequence[int] | None = None) -> np.ndarray:
    """Grad-CAM of the cancer logit, on the maps that a model pools: enlarged to the image, what speaks against cancer cut off.

    With a neck each of its levels has a map of its own, and they are added up, each with the weight that its places have
    together. A forward pass is what it takes: the backbone runs without gradients.

    Args:
        model: of this kit, on any device; it is used as it is in inference, in float32.
        images: (H, W) each, of one size: whole numbers in 0..4095 as a store gives them, or floats in [0, 1]. Single images, or
            all views of one breast where the model sees breasts.
        view_id: which view each is, numbers in `targets.VIEW_KINDS`, where a model sees breasts and attends to them.

    Returns:
        (N, H, W) float32 in [0, 1]. The largest value is 1 in each image, or over all views of a breast where the model sees
        breasts, so that these can be compared; zeros where nothing speaks for cancer.

    Raises:
        ValueError: the model has no maps, or its maps are of one place, or images have several sizes.
    """
    if not isinstance(model, CancerNet):
        raise ValueError(
            f"heatmap: a {type(model).__name__} has no maps that are known; expected a model of build_model"
        )
    by_breast, device = model.config.views != "none", model.mean.device
    x = [torch.from_numpy(_shades(image))[None, None].to(device) for image in images]
    kinds = torch.as_tensor(np.asarray(view_id), device=device) if by_breast and view_id is not None else None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            levels = [torch.cat(level) for level in zip(*(model.maps(image) for image in x), strict=True)]
        cams = _grad_cam(_BehindMaps(model, len(levels), kinds), levels)
    finally:
        model.train(was_training)
    heat = _on_image(cams, x[0].shape[2:], model.config.input_pad or (0, 0, 0, 0))
    largest = heat.amax() if by_breast else heat.amax((1, 2), keepdim=True)
    return (heat / largest.clamp(min=torch.finfo(heat.dtype).tiny)).clamp(0, 1).cpu().numpy()


class OutOfFold:
    """Heat maps of a run's images, each by the model of the fold that held its patient out: the one that its score is from.

    Models are loaded when they are asked for, and kept.

    Args:
        run: a run's folder.
        table: all images of the breasts in question: patient_id, laterality, view, image_id. A model that sees breasts is
            shown all of a breast's images that have pixels.
        store: that holds them, prepared as the run was trained.
        device: that the models run on.

    Attributes:
        fold_of: patient_id to the fold that held it out; a Series.

    Raises:
        rsnakit.runs.RunError: a fold's oof.csv is not there or not whole, or the store was prepared with other settings than
            the run was trained with.
    """

    def __init__(self, run: Path | str, table: pd.DataFrame, store: Store, device: str = "cpu") -> None:
        self.run, self.store, self.device = Path(run), store, device
        differing = runs.compare(runs.read_config(self.run)["preprocess"], store.manifest["preprocess"])
        if differing:
            shown = ", ".join(
                f"{name}={there!r} (trained with {before!r})" for name, (before, there) in differing.items()
            )
            raise runs.RunError(f"{store.path}: not the images that {self.run.name} was trained on: {shown}")
        ok = store.index.loc[store.index["status"] == "ok", "image_id"]
        self.table = table[table["image_id"].isin(ok)]
        self.fold_of = runs.read_oof(self.run).drop_duplicates("patient_id").set_index("patient_id")["fold"]
        self._models: dict[int, CancerNet] = {}

    def model_of(self, patient_id: str) -> CancerNet:
        """The model that never saw a patient; KeyError where no trained fold held it out."""
        fold = int(self.fold_of[patient_id])
        if fold not in self._models:
            model = load_model(runs.trained_folds(self.run)[fold])
            self._models[fold] = model.to(self.device, memory_format=torch.channels_last)  # faster on CPUs too
        return self._models[fold]

    def of(self, image_ids: Iterable[str]) -> dict[str, np.ndarray]:
        """Heat maps by image_id, (H, W) float32 in [0, 1] each; without those of images that have no pixels, or whose patient
        was not held out by any fold of the run."""
        wanted = set(image_ids)
        held_out = self.table[self.table["patient_id"].isin(self.fold_of.index)]
        asked = held_out[held_out["image_id"].isin(wanted)]
        found: dict[str, np.ndarray] = {}
        for patient_id, laterality in asked[BREAST].drop_duplicates().itertuples(index=False):
            same = (held_out["patient_id"] == patient_id) & (held_out["laterality"] == laterality)
            model, rows = self.model_of(patient_id), held_out[same]
            if model.config.views == "none":
                rows = rows[rows["image_id"].isin(wanted)]
            images = [self.store[int(row)] for row in self.store.rows_of(rows["image_id"])]
            found |= zip(rows["image_id"], heatmap(model, images, view_ids(rows["view"])), strict=True)
        return {image_id: heat for image_id, heat in found.items() if image_id in wanted}


class _BehindMaps(nn.Module):
    """What a model does behind its maps, (N, C, h, w) each level, up to the cancer logit: (N,) of images, (1,) of a breast."""

    def __init__(self, model: CancerNet, n_levels: int, view_id: torch.Tensor | None) -> None:
        super().__init__()
        self.model, self.view_id = model, view_id
        self.levels = nn.ModuleList(nn.Identity() for _ in range(n_levels))  # layers for captum to look at

    def forward(self, *maps: torch.Tensor) -> torch.Tensor:
        features = self.model.pooled([level(x) for level, x in zip(self.levels, maps, strict=True)])
        if self.model.config.views == "none":
            return self.model.classify(features)["cancer"]
        return self.model.classify(features[None], None, None if self.view_id is None else self.view_id[None])["cancer"]


def _grad_cam(behind: _BehindMaps, maps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Grad-CAM at each level, (N, 1, h, w)."""
    from captum.attr import LayerGradCam  # here, as it takes seconds that only who asks for heat maps should wait

    maps = tuple(x.requires_grad_() for x in maps)
    return [LayerGradCam(behind, layer).attribute(maps, relu_attributions=True).detach() for layer in behind.levels]


def _on_image(cams: list[torch.Tensor], size: Sequence[int], pad: Sequence[int]) -> torch.Tensor:
    """The levels' maps enlarged to the image and added up, (N, H, W).

    Args:
        size: (H, W).
        pad: left, right, top, bottom: what the model puts around the image, which the maps cover too.
    """
    left, right, top, bottom = pad
    height, width = size[0] + top + bottom, size[1] + left + right
    total = 0
    for cam in cams:
        places = cam.shape[2] * cam.shape[3]
        grid = _grid(places, height, width) if cam.shape[3] == 1 else cam.shape[2:]
        cam = cam.reshape(len(cam), 1, *grid)
        # Captum's weights are means over places, which makes a coarse level's values larger than a fine one's.
        total = total + places * F.interpolate(cam, (height, width), mode="bilinear")[:, 0]
    if all(cam[0].numel() == 1 for cam in cams):
        raise ValueError(f"heatmap: the maps of an image of {tuple(size)} are of one place, which shows nothing")
    return total[:, top : height - bottom, left : width - right]


def _grid(places: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of a transformer's tokens: so many places in a shape that is most like the image's."""
    rows = [rows for rows in range(1, places + 1) if places % rows == 0]
    best = min(rows, key=lambda rows: abs(np.log(rows * rows / places) - np.log(height / width)))
    return best, places // best


def _shades(image: np.ndarray) -> np.ndarray:
    if image.dtype.kind in "iu":
        return image.astype(np.float32) / np.float32(MAX_VALUE)
    return np.ascontiguousarray(image, np.float32)
