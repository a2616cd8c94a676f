"""Mixup and CutMix: a batch's images mixed with those of the same batch in reverse order, and the labels that come with them.

Mixup adds two images in shares (Zhang et al., 2018), CutMix puts a rectangle of one into the other (Yun et al., 2019); the
loss is taken on the labels of both, in the shares of the images. timm does the mixing.
"""

from collections.abc import Mapping

import torch
from timm.data import Mixup


class Mix:
    """Mixes batches, by mixup or CutMix; where both are on, either with a chance of one half.

    What is drawn comes from numpy's global generator, a share a batch. Nothing is read from the device.

    Args:
        mixup, cutmix: alpha of the Beta distribution that the share is drawn from; 0: off. Small ones, 0.2 say, mostly leave
            one of the two images nearly as it is; 1 draws evenly.
    """

    def __init__(self, mixup: float, cutmix: float) -> None:
        # No labels are mixed here, as the loss is: the two made-up ones below come back as its share.
        self._mix = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=2) if mixup or cutmix else None

    def __call__(self, images: torch.Tensor) -> float:
        """Mixes a batch in place, each image with the one that `partners` names.

        Args:
            images: (B, 1, H, W) of any float type. Of an odd number the last one stays as it is; one alone is not mixed.

        Returns:
            The share that each image keeps, in [0, 1]; of CutMix the share of pixels.

        Raises:
            ValueError: not images, but breasts of several views.
        """
        if images.ndim != 4:
            raise ValueError(
                f"mixing takes images (B, 1, H, W), not {tuple(images.shape)}: with views give mixup=0 and cutmix=0"
            )
        even = _even(images)
        if self._mix is None or not even:
            return 1.0
        _, shares = self._mix(images[:even], torch.tensor([0, 1]))
        return float(shares[0, 0])  # on the CPU, wherever the images are


def partners(labels: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The labels, by name (B,), of the images that `Mix` mixed into each: those of the batch in reverse order; where B is odd
    the last one keeps its own."""
    return {name: torch.cat([x[: _even(x)].flip(0), x[_even(x) :]]) for name, x in labels.items()}


def _even(x: torch.Tensor) -> int:
    return len(x) - len(x) % 2
