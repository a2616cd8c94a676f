"""Memory that a loader's worker shares with its parent, and uses again once the parent has let go of it.

New shared memory is slow: the system brings it page by page, which for images of half a megapixel takes longer than reading and
augmenting them. So a worker keeps the memory of its batches, and writes a batch where the parent is done with an older one.
"""

import math
import weakref
from typing import Any

import numpy as np
import torch

HEADER = 64  # bytes before the values; the first says whether a batch is out. So many keep the values aligned
FREE, OUT = 0, 1
MOST = 3  # pieces that a worker keeps: two batches that it is ahead, as torch has it, and the one in use


class Lent:
    """A batch's memory on its way to the parent, where it arrives as a tensor of its own: `values` as they are then.

    The parent's tensor may be kept as long as one likes, and so may its views: the memory is free when the last one is gone.
    What is never sent is free when this is gone.

    Attributes:
        values: float32 tensor to be filled.
    """

    def __init__(self, piece: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._piece, self._sent = piece, False
        self.values = piece[HEADER : HEADER + 4 * math.prod(shape)].view(torch.float32).view(shape)
        piece[0] = OUT

    def take(self, values: torch.Tensor) -> "Lent":
        """Has the parent get all of this memory in the shape of `values`, a view of it."""
        self.values = values
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self._sent = True
        return _receive, (self._piece, tuple(self.values.shape))

    def __del__(self) -> None:
        if not self._sent:
            self._piece[0] = FREE


class Pool:
    """The memory that a worker keeps for its batches.

    Args:
        most: pieces that are kept; while all are out a batch gets memory that is not kept.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.pieces: list[torch.Tensor] = []

    def lend(self, shape: tuple[int, ...]) -> Lent:
        """Memory for a float32 tensor of a shape.

        Raises:
            RuntimeError: there is no shared memory left.
        """
        size = HEADER + 4 * math.prod(shape)
        free = [piece for piece in self.pieces if piece[0] == FREE]
        piece = min((piece for piece in free if len(piece) >= size), key=len, default=None)
        if piece is None:
            if free:  # too small: batches have grown
                self.pieces = [other for other in self.pieces if other is not free[0]]
                del free
            piece = _new(size)
            if len(self.pieces) < self.most:
                self.pieces.append(piece)
        return Lent(piece, shape)


def _new(size: int) -> torch.Tensor:
    """Bytes in shared memory, as torch's own collate gets it."""
    storage = torch.empty(0, dtype=torch.uint8)._typed_storage()._new_shared(size, device="cpu")
    return torch.empty(0, dtype=torch.uint8).new(storage).resize_(size)


def _receive(piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The parent's tensor of what was lent."""
    whole = piece.numpy()
    values = whole[HEADER : HEADER + 4 * math.prod(shape)].view(np.float32).reshape(shape)
    # The tensor holds this array, and every view of the tensor holds the tensor's storage, which holds it, too.
    weakref.finalize(values, _let_go, whole).atexit = False
    return torch.from_numpy(values)


def _let_go(whole: np.ndarray) -> None:
    whole[0] = FREE
