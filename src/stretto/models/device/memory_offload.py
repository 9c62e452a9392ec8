"""Frees the memory of tensors while another process uses the device, and restores it.

On a CPU the contents go to a file and the pages are returned to the system (`madvise`). The addresses stay the same, so
that kernels which hold pointers need no change. On a GPU the contents go to pinned memory of the host, and the storages
are emptied. Contents that are not kept are undefined afterwards; their owner fills them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

if TYPE_CHECKING:
    from jaxtyping import Shaped

logger = logging.getLogger(__name__)

_MADV_DONTNEED = 4
_PAGE = mmap.PAGESIZE


@dataclass
class _Part:
    """One storage: its size, and its contents' offset in the file or copy in host memory."""

    storage: UntypedStorage
    num_bytes: int
    offset: int = 0
    host: Tensor | None = None


class MemoryOffload:
    """The memory of some tensors: offload() frees it, restore() allocates it again."""

    def __init__(self, directory: Path | None = None) -> None:
        """directory: where a CPU's contents are written; None: the system's temporary directory."""
        self._directory = directory
        self._parts: list[_Part] = []
        self._file: mmap.mmap | None = None
        self.is_offloaded = False

    def offload(self, tensors: Iterable[Shaped[Tensor, " *_"]], *, keeps: bool) -> int:
        """Free the memory of these tensors, with contents saved if `keeps`; returns the bytes."""
        assert not self.is_offloaded, "the memory is offloaded already"
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.device.type != "meta"}
        self._parts = [_Part(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        on_host = [part for part in self._parts if part.storage.device.type == "cpu"]
        if keeps and on_host:
            self._open_file(on_host)
        for part in self._parts:
            if part.storage.device.type == "cpu":
                if self._file is not None:
                    self._file[part.offset : part.offset + part.num_bytes] = _view(part.storage)
                _give_pages_back(part.storage)
            else:
                if keeps:
                    part.host = torch.empty(part.num_bytes, dtype=torch.uint8, pin_memory=True)
                    part.host.copy_(_bytes_of(part.storage))
                part.storage.resize_(0)
        if self._file is not None:
            self._file.flush()
            self._file.madvise(mmap.MADV_DONTNEED)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        trim()
        self.is_offloaded = True
        return sum(part.num_bytes for part in self._parts)

    def restore(self) -> None:
        """Allocate the memory again, with the contents that were kept."""
        assert self.is_offloaded, "the memory is not offloaded"
        for part in self._parts:
            if part.storage.device.type == "cpu":
                if self._file is not None:
                    _view(part.storage)[:] = self._file[part.offset : part.offset + part.num_bytes]
            else:
                part.storage.resize_(part.num_bytes)
                if part.host is not None:
                    _bytes_of(part.storage).copy_(part.host)
        if self._file is not None:
            self._file.close()
            self._file = None
        self._parts, self.is_offloaded = [], False

    def _open_file(self, parts: list[_Part]) -> None:
        total = 0
        for part in parts:
            part.offset = total
            total += -(-part.num_bytes // _PAGE) * _PAGE
        with tempfile.TemporaryFile(dir=self._directory) as file:
            file.truncate(total)
            self._file = mmap.mmap(file.fileno(), total)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: UntypedStorage) -> memoryview:
    """The bytes of a CPU's storage."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _give_pages_back(storage: UntypedStorage) -> None:
    """Return the whole pages of private memory to the system; the rest may be shared."""
    first = -(-storage.data_ptr() // _PAGE) * _PAGE
    last = (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE
    if storage.is_shared() or last <= first:  # shared pages would come back with their contents
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED):
        logger.debug("madvise: errno %d", ctypes.get_errno())


def trim() -> None:
    """Have the C library return its free memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
