# SPDX-License-Identifier: Apache-2.0
"""The zip archives that `torch.save` writes, read: uncompressed records, found by the directory at the end.

No more is understood than torch writes. A record's bytes are within the item, and memory is allocated for what is
there, not for what a header says.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch

from offstage.checkpoint.files import Source
from offstage.checkpoint.pickles import Refused

LOCAL = struct.Struct("<4s5H3I2H")
"""The header before a record."""
CENTRAL = struct.Struct("<4s6H3I5H2I")
"""The directory's entry for a record."""
ZIP64_END = struct.Struct("<4sQ2H2I4Q")
ZIP64_LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4s4H2IH")
ZIP64_FROM = 0xFFFFFFFF
"""Stands for a number that is among the 64-bit ones of the record's extra fields."""
EXTRA_ZIP64 = 0x0001

MAX_DIRECTORY_BYTES = 16 * 1024 * 1024  # a record takes about 100
_TAIL = ZIP64_END.size + ZIP64_LOCATOR.size + END.size


class _Record(NamedTuple):
    header: int
    """The position of the record's header in the item."""
    nbytes: int
    crc32: int


class Archive:
    """The records of an item. Positions are relative to the item."""

    def __init__(self, source: Source, offset: int, length: int) -> None:
        self._source, self._offset = source, offset
        tail = source.read(offset + max(0, length - _TAIL), min(length, _TAIL))
        self._end, nbytes = self._directory(tail, length)
        """Where the directory begins: records are before it."""
        self._records = dict(self._entries(self._read(self._end, nbytes)))
        pickles = [name for name in self._records if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Refused(f"an archive with {len(pickles)} pickles")
        self._root = pickles[0].removesuffix("data.pkl")

    def _read(self, position: int, nbytes: int) -> bytes:
        return self._source.read(self._offset + position, nbytes)

    def _directory(self, tail: bytes, length: int) -> tuple[int, int]:
        """Position and length of the directory, which is right before the records that end the archive."""
        end = tail[-END.size :]
        if len(end) < END.size or end[:4] != b"PK\x05\x06":
            raise Refused("no zip archive")
        *_, nbytes, position, _ = END.unpack(end)
        after = END.size
        if len(tail) == _TAIL and tail[:4] == b"PK\x06\x06":
            *_, nbytes, position = ZIP64_END.unpack_from(tail)
            after = _TAIL
        if position + nbytes + after != length or nbytes > MAX_DIRECTORY_BYTES:
            raise Refused("a zip archive with a directory in another place than torch puts it")
        return position, nbytes

    def _entries(self, directory: bytes) -> Iterator[tuple[str, _Record]]:
        seen: set[str] = set()
        position = 0
        while position < len(directory):
            if len(directory) - position < CENTRAL.size or directory[position : position + 4] != b"PK\x01\x02":
                raise Refused("a zip archive with a damaged directory")
            fields = CENTRAL.unpack_from(directory, position)
            flags, method, crc32, packed, nbytes, name_bytes, extra_bytes, comment_bytes = (
                *(fields[3], fields[4], fields[7], fields[8], fields[9]),
                *fields[10:13],
            )
            position += CENTRAL.size
            name = directory[position : position + name_bytes].decode("utf-8", "replace")
            extra = directory[position + name_bytes : position + name_bytes + extra_bytes]
            position += name_bytes + extra_bytes + comment_bytes
            wide = iter(_wide(extra))
            nbytes, packed, header = (
                next(wide, one) if one == ZIP64_FROM else one for one in (nbytes, packed, fields[16])
            )
            if name in seen:
                raise Refused(f"two records called {name[:200]!r}")
            seen.add(name)
            if method or flags & 1 or packed != nbytes:
                raise Refused("compressed data")
            yield name, _Record(header, nbytes, crc32)

    def place(self, name: str) -> tuple[int, int]:
        """Position and length of a record's content; raises unless all of it is before the directory."""
        record = self._records.get(self._root + name)
        if record is None:
            raise Refused(f"no record {name[:200]!r}")
        path = (self._root + name).encode()
        if record.header + LOCAL.size + len(path) > self._end:
            raise Refused(f"a record {name[:200]!r} outside the item")
        header = self._read(record.header, LOCAL.size + len(path))
        fields = LOCAL.unpack_from(header)
        start = record.header + LOCAL.size + fields[9] + fields[10]
        if fields[0] != b"PK\x03\x04" or header[LOCAL.size :] != path or start + record.nbytes > self._end:
            raise Refused(f"a record {name[:200]!r} that is not where the directory says")
        # The next record, a descriptor of this one, or the directory. The content itself has no mark, and one wrong
        # length of a name or padding would shift it.
        if self._read(start + record.nbytes, 2) != b"PK":
            raise Refused(f"a record {name[:200]!r} that does not end where it should")
        return start, record.nbytes

    def pickle(self, at_most: int) -> bytes:
        """The pickle. Its checksum is compared, unless `torch.serialization.set_crc32_options` left it out."""
        start, nbytes = self.place("data.pkl")
        if nbytes > at_most:
            raise Refused(f"a pickle of {nbytes} bytes")
        data = self._read(start, nbytes)
        if self._records[f"{self._root}data.pkl"].crc32 not in (0, zlib.crc32(data)):
            raise Refused("a pickle that does not fit its checksum")
        return data

    def check_byte_order(self) -> None:
        if f"{self._root}byteorder" not in self._records:
            return
        start, nbytes = self.place("byteorder")
        found = self._read(start, min(nbytes, 16))
        if found != sys.byteorder.encode():
            raise Refused(f"{found.decode('ascii', 'replace')}-endian data on a {sys.byteorder}-endian machine")

    def storage(self, key: str) -> torch.UntypedStorage:
        """The content of a record of data."""
        start, nbytes = self.place(f"data/{key}")
        try:
            data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:  # as long as the file says that it is, and it may be sparse
            raise Refused(f"{nbytes} bytes of data, for which there is no memory") from error
        self._source.read_into(memory_of(data), self._offset + start)
        return data.untyped_storage()

    def data_bytes(self) -> int:
        """Where the records end: they have no more bytes together."""
        return self._end


def _wide(extra: bytes) -> tuple[int, ...]:
    """The 64-bit fields of a record, in their order."""
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, position)
        if kind == EXTRA_ZIP64:
            found = extra[position + 4 : position + 4 + nbytes // 8 * 8]
            return struct.unpack(f"<{len(found) // 8}Q", found[: len(found) // 8 * 8])
        position += 4 + nbytes
    return ()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    line = tensor.as_strided((tensor.numel(),), (1,))  # view(-1) may keep another stride of a single element
    return memoryview(cast(Any, line.view(torch.uint8).numpy()))
