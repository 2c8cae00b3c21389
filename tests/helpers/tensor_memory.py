"""The most memory that tensors take at once, on any device: the CPU's and `meta` have no counter of their own."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class TensorMemory(TorchDispatchMode):
    """Counts the bytes of every storage that is made while it is entered, until it is gone.

    Only tensors that `counts` accepts are counted.
    """

    def __init__(self, counts=lambda tensor: True):
        super().__init__()
        self._counts = counts
        self.live = self.peak = self.largest = 0
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = [tensor.untyped_storage() for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        known = {id(storage) for storage in before}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor) and self._counts(tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in known and storage not in self._seen:
                    self._add(storage)
        return made

    def _add(self, storage):
        size = storage.nbytes()
        self._seen[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size):
        self.live -= size
