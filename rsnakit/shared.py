"""Memory that a loader's worker shares with its parent, and uses again once both have let go of it.

New shared memory is slow: the system brings it page by page, which for images of half a megapixel takes longer than reading and
augmenting them. So a worker keeps the memory of its batches, and writes a batch where the parent is done with an older one.
"""

import math
import os
import weakref
from typing import Any

import numpy as np
import torch

HEADER = 64  # bytes before the values, so many that these are aligned; the first two say who holds them
WORKER, PARENT = 0, 1  # where in the header
MOST = 4  # pieces that a worker keeps: two batches that it is ahead, as torch has it, the one in use, and the one before it


class Lent:
    """A batch's memory on its way to the parent, where it arrives as a tensor of its own: `values` as they are then.

    Either side may keep its tensor as long as it likes, and views of it: the memory is free when the last one is gone on both.
    A view that is sent by itself is copied, as any tensor is that is not in shared memory. A Lent is sent once.

    Attributes:
        values: float32 tensor to be filled.
    """

    def __init__(self, piece: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._piece = piece
        self.values = _held(piece, shape, WORKER)

    def take(self, values: torch.Tensor) -> "Lent":
        """Has the parent get all of this memory in the shape of `values`, a view of it."""
        self.values = values
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self._piece[PARENT] = True  # from now on, and not when it is unpacked: until then nobody else holds it
        return _held, (self._piece, tuple(self.values.shape), PARENT)


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
        free = [piece for piece in self.pieces if not piece[: PARENT + 1].any()]
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
    """Bytes in shared memory, as torch's own collate gets it; 0 at first."""
    storage = torch.empty(0, dtype=torch.uint8)._typed_storage()._new_shared(size, device="cpu")
    return torch.empty(0, dtype=torch.uint8, device="cpu").new(storage).resize_(size)


def _held(piece: torch.Tensor, shape: tuple[int, ...], holder: int) -> torch.Tensor:
    """The values of a piece as a tensor, which `holder` holds until it and all its views are gone."""
    whole = piece.numpy()
    whole[holder] = True
    values = whole[HEADER : HEADER + 4 * math.prod(shape)].view(np.float32).reshape(shape)
    # The tensor holds this array, and every view of the tensor holds the tensor's storage, which holds it, too.
    weakref.finalize(values, _let_go, whole, holder, os.getpid()).atexit = False
    return torch.from_numpy(values)


def _let_go(whole: np.ndarray, holder: int, process: int) -> None:
    if os.getpid() == process:  # a process that was forked since has the tensor as well, and it is not its own
        whole[holder] = False
