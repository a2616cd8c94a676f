"""What autograd holds between forward and backward, measured: for the tests of checkpointing, and its bench."""

import torch
from torch import nn


def bytes_kept(model: nn.Module, images: torch.Tensor) -> int:
    """Of the storages that autograd keeps for backward, each counted once, without the model's own."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(images)
    return sum(storage.nbytes() for storage in kept.values())
