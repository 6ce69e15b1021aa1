"""Reads planned regions of raw C-order chunks: exact ranges, few calls, few copies. All formats use
it.

Regions are cut into pieces of bounded size, sorted by their place in the files, and distributed
over threads. A piece that is consecutive in the file is read directly into the target's memory,
small neighbours by one call. All other pieces pass through a small scratch memory. With ``verify``,
whole digest blocks are read and hashed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise, product, starmap
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from megackpt import limits
from megackpt.backends.base import THREADS, Target
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box, Int64, c_strides, cut, extents_within, runs
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    Bool,
    Digests,
    LoadPlan,
    ReadItem,
    digest_rows,
    itemsizes,
)
from megackpt.serialization.archive import Archive
from megackpt.storage import (
    FileReader,
    Storage,
    allocate,
    digest,
    digest_blocks,
    read_again,
    read_dense,
    read_digested,
    refuse_holes,
)

GAP = 16 << 10
"""Unwanted bytes between the runs of one region that are read along: more would cost more than a
call."""
WINDOW = 1 << 20
"""Bytes of scratch memory of one thread. It stays in the cache, so a copy through it costs less
than passing the rows of a strided target one by one."""

PIECE = 32 << 20
"""Larger regions are cut: the target provides memory for one piece at a time, and threads divide
the work."""
SMALL = 256 << 10
"""Pieces up to this size are read together with their neighbours."""
TOGETHER = 1 << 20
"""Bytes that one call reads for small pieces: few enough to be in the cache when they are
hashed."""
CALL = 512
"""Pieces of one call: with the gaps between them, the limit of buffers of a call."""
SKIP = 4 << 10
"""Unwanted bytes between small pieces that are read and dropped to save another call."""

FAR = 4 << 20
"""With more unwanted bytes between the runs of one region, a request for each run is faster than
one for all."""

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Columns: regions, each with its place in its chunk. In file order, without empty ones."""

    row: Int64  # of the plan
    ndim: Int64
    offset: Int64  # (n, width)
    shape: Int64  # (n, width)
    file: Int64
    base: Int64  # where the chunk starts in the file
    length: Int64  # of the chunk
    low: Int64  # first byte of the region, relative to the chunk
    high: Int64  # one past its last byte
    nbytes: Int64
    strides: Int64  # (n, width), of the chunk, in bytes

    @classmethod
    def of(cls, plan: LoadPlan, rows: Int64) -> Pieces:
        chunks = plan.manifest.chunks
        tensors = plan.manifest.tensors
        itemsize = itemsizes(tensors)[chunks.tensor[plan.chunk[rows]]]
        boxes = plan.boxes.take(rows)
        if (boxes.volume * itemsize > PIECE).any():
            extents = extents_within(boxes.shape, PIECE // itemsize)
            # Powers of two, so that most pieces end where digest blocks do.
            is_cut = extents < boxes.shape
            extents[is_cut] = 1 << np.log2(extents[is_cut]).astype(np.int64)
            origin, boxes = cut(boxes, extents, boxes.offset)
            rows = rows[origin]
            itemsize = itemsize[origin]
        chunk = plan.chunk[rows]
        width = max(boxes.width, chunks.boxes.width)
        boxes = boxes.widened(width)
        holder = chunks.boxes.take(chunk).widened(width)
        length = chunks.length[chunk]
        inside = (boxes.offset >= holder.offset) & (boxes.stop <= holder.stop)
        fits = inside.all(axis=1) & (holder.volume * itemsize == length)
        if not fits.all():
            wrong = int(fits.argmin())
            name = name_of(plan, int(rows[wrong]))
            raise CorruptCheckpoint(
                f"{name} does not fit the {length[wrong]} bytes of its location"
            )

        strides = c_strides(holder.shape) * itemsize[:, None]
        low = ((boxes.offset - holder.offset) * strides).sum(axis=1)
        last = low + ((boxes.shape - 1) * strides).sum(axis=1)
        ndims = np.array([len(entry.meta.shape) for entry in tensors], np.int64)
        pieces = cls(
            row=rows,
            ndim=ndims[chunks.tensor[chunk]],
            offset=boxes.offset,
            shape=boxes.shape,
            file=chunks.file[chunk].astype(np.int64),
            base=chunks.start[chunk],
            length=length,
            low=low,
            high=last + itemsize,
            nbytes=boxes.volume * itemsize,
            strides=strides,
        )
        order = np.lexsort((pieces.base + low, pieces.file))
        return pieces.take(order[pieces.nbytes[order] > 0])

    def __len__(self) -> int:
        return len(self.row)

    def take(self, rows: Int64 | slice) -> Pieces:
        return Pieces(*(column[rows] for column in vars(self).values()))

    def spans(self, rows: slice, checked: bool) -> Iterator[tuple[int, int]]:
        """Starts and stops in the file of the bytes that will be read for these pieces, lazily.

        Pieces whose runs are far from each other are left out.
        """
        mine = self.take(rows)
        low = mine.low
        high = mine.high
        if checked:
            low = low // DIGEST_BLOCK * DIGEST_BLOCK
            high = np.minimum(-(-high // DIGEST_BLOCK) * DIGEST_BLOCK, mine.length)
            dense = np.ones(len(low), np.bool_)
        else:
            # The bytes of each piece that are consecutive in its chunk, at least.
            run = mine.nbytes // mine.shape.prod(axis=1)
            together = np.ones(len(run), np.bool_)
            for axis in reversed(range(mine.strides.shape[1])):
                extent = mine.shape[:, axis]
                together &= (extent == 1) | (mine.strides[:, axis] == run)
                run = np.where(together, run * extent, run)
            dense = high - low - mine.nbytes <= FAR * (mine.nbytes // run - 1)
        starts = (mine.base + low)[dense]
        stops = (mine.base + high)[dense]
        yield from zip(starts.tolist(), stops.tolist(), strict=True)

    def simple(self, checked: bool) -> Bool:
        """Which pieces are small and without gaps: one call can read them with their neighbours."""
        simple: Bool = (self.high - self.low == self.nbytes) & (self.nbytes <= SMALL)
        if checked:  # only whole blocks can be hashed where they land
            simple &= self.low % DIGEST_BLOCK == 0
            simple &= (self.high % DIGEST_BLOCK == 0) | (self.high == self.length)
        return simple

    def shares(
        self, threads: int, checked: bool
    ) -> Iterator[tuple[Pieces, list[slice]]]:
        """Consecutive pieces of about equal bytes: several shares a thread, so that threads end
        together.

        Each share comes with its groups: the pieces of one file that one call reads. A piece that
        is not simple, or does not follow closely, is a separate group.
        """
        if not len(self):
            return
        simple = self.simple(checked)
        before = np.cumsum(self.nbytes) - self.nbytes
        call = before // TOGETHER + np.arange(len(self)) // CALL
        gap = (self.base + self.low)[1:] - (self.base + self.high)[:-1]
        follows = simple[1:] & simple[:-1] & (gap >= 0) & (gap <= SKIP)
        follows &= (self.file[1:] == self.file[:-1]) & (call[1:] == call[:-1])
        starts = np.append(0, np.flatnonzero(~follows) + 1)  # of groups

        size = min(PIECE, max(TOGETHER, int(self.nbytes.sum()) // (4 * threads) + 1))
        share = before[starts] // size
        bounds = np.append(starts, len(self))
        for first, last in pairwise(runs(share).tolist()):
            begin = int(bounds[first])
            groups = (bounds[first : last + 1] - begin).tolist()
            part = self.take(slice(begin, int(bounds[last])))
            yield part, list(starmap(slice, pairwise(groups)))


def name_of(plan: LoadPlan, row: int) -> str:
    """The name of the chunk of a plan's row in errors."""
    manifest = plan.manifest
    number = int(plan.chunk[row])
    chunk = manifest.chunk(number)
    key = manifest.tensors[manifest.chunks.tensor[number]].key
    return f"{key!r} {chunk.box} in {chunk.location.file}"


def read_raw(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Read every region of a plan. The encoding of the manifest is "raw".

    With ``verify``, whole digest blocks are read and compared if the manifest has digests.
    Otherwise only the bytes needed are read, and gaps that are cheaper than a call. Raises
    CorruptCheckpoint naming key, box, file and block, for all failures at once.
    """
    if not len(plan):
        return
    manifest = plan.manifest
    job = _Job(root, plan, into, verify and len(manifest.chunks.digests) > 0)
    itemsize = itemsizes(manifest.tensors)[manifest.chunks.tensor[plan.chunk]]
    blobs = np.flatnonzero(itemsize == 0)
    file = manifest.chunks.file[plan.chunk[blobs]]
    pieces = Pieces.of(plan, np.flatnonzero(itemsize))
    with ThreadPoolExecutor(THREADS, "megackpt-read") as pool:
        jobs = [
            pool.submit(job.read_objects, blobs[file == number])
            for number in np.unique(file)
        ]
        shares = pieces.shares(THREADS, job.checked)
        jobs += [pool.submit(job.read_pieces, *share) for share in shares]
    errors = [error for j in jobs if (error := j.exception())]
    if not errors:
        return
    texts = list(dict.fromkeys(map(str, errors)))
    if len(texts) == 1 or any(type(e) is not CorruptCheckpoint for e in errors):
        raise errors[0]
    raise CorruptCheckpoint("\n".join(texts)) from errors[0]


def hand_out(values: Array, box: Box, items: Iterable[ReadItem], into: Target) -> None:
    """Copy the regions of ``items`` out of ``values``, the decoded elements of ``box``."""
    for item in items:
        filled = into.open(item.target, item.box)
        index: Any = (*item.box.relative_to(box).slices(), ...)
        filled[...] = values[index].view(filled.dtype)
        into.close(item.target, item.box, filled)


class _Piece(NamedTuple):
    """One region: one row of Pieces, and its destination."""

    row: int  # of the plan
    target: int
    box: Box
    array: Array
    base: int
    length: int
    low: int
    strides: list[int]


@dataclass(frozen=True, eq=False)
class _Job:
    """One load. Its threads call ``read_objects`` and ``read_pieces``.

    ``checked``: compare digests, which the manifest has.
    """

    root: Storage
    plan: LoadPlan
    into: Target
    checked: bool

    def read_objects(self, rows: Int64) -> None:
        """Fetch blobs that are all in one file."""
        chunks = self.plan.manifest.chunks
        with self._open(int(chunks.file[self.plan.chunk[rows[0]]])) as reader:
            for row in rows.tolist():
                chunk = self.plan.chunk[row]
                start = int(chunks.start[chunk])
                length = int(chunks.length[chunk])
                name = f"{self.root.location}: {name_of(self.plan, row)}"
                if start + length > reader.size:
                    raise CorruptCheckpoint(
                        f"{name} should end at byte {start + length}, "
                        f"but the file has {reader.size}"
                    )
                blob = partial(self._read_blob, reader, row, start, length, name)
                self.into.blob(int(self.plan.target[row]), read_again(reader, blob))

    def _read_blob(
        self, reader: FileReader, row: int, start: int, length: int, name: str
    ) -> bytes:
        data = read_record(reader, start, length, name)
        if self.checked:
            self.check(row, 0, digest_blocks(memoryview(data)))
        return bytes(data)

    def read_pieces(self, pieces: Pieces, groups: list[slice]) -> None:
        """Read consecutive pieces, group by group."""
        files = pieces.file.tolist()
        simple = _SimplePieces.of(self, pieces)
        for file, same_file in groupby(groups, lambda group: files[group.start]):
            mine = list(same_file)
            with self._open(file) as reader:
                rows = slice(mine[0].start, mine[-1].stop)
                reader.expect(pieces.spans(rows, self.checked))
                part = _FilePart(self, reader, simple)
                for group in mine:
                    read_again(reader, partial(part.fetch, pieces, group))

    def check(self, row: int, first: int, found: bytes) -> None:
        """Compare joined digests, from block ``first`` on, of the chunk that a plan's row is in."""
        digests = digest_rows(found)
        wrong = digests != self.digests(row, np.arange(first, first + len(digests)))
        if wrong.any():
            chunks = self.plan.manifest.chunks
            chunk = self.plan.chunk[row]
            block = first + int(wrong.any(axis=1).argmax())
            start = int(chunks.start[chunk]) + block * DIGEST_BLOCK
            raise CorruptCheckpoint(
                f"{self.root.location}: {name_of(self.plan, row)} is damaged: the bytes of "
                f"block {block} (from byte {start} of the file) are not those that were saved"
            )

    def digests(self, rows: Any, blocks: Any) -> Digests:
        """The stored digests of these blocks of the chunks that these rows are in."""
        chunks = self.plan.manifest.chunks
        number = chunks.block_bounds[self.plan.chunk[rows]] + blocks
        found: Digests = chunks.digests[number]
        return found

    def _open(self, file: int) -> FileReader:
        name = self.plan.manifest.files[file]
        try:
            return self.root.open(name)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(
                f"{self.root.location}: the file {name!r} of the checkpoint is missing"
            ) from error

    def opened(self, pieces: Pieces, numbers: Any) -> Iterator[_Piece]:
        """Open the targets of these pieces."""
        columns = (
            pieces.row, pieces.ndim, pieces.offset, pieces.shape,
            pieces.base, pieces.length, pieces.low, pieces.strides,
        )  # fmt: skip
        lists = [column[numbers].tolist() for column in columns]
        for row, ndim, offset, shape, *place in zip(*lists, strict=True):
            target = int(self.plan.target[row])
            box = Box(tuple(offset[:ndim]), tuple(shape[:ndim]))
            yield _Piece(row, target, box, self.into.open(target, box), *place)


def read_record(reader: FileReader, start: int, length: int, where: str) -> bytearray:
    """The bytes of a blob or an archive.

    CorruptCheckpoint, before memory is taken, if the pickle of a large one is a hole in a sparse
    file. The whole blob counts if it is not an archive. Tensors in an archive may be holes: they
    are zeros.
    """

    def fetch(at: int, size: int) -> bytes:
        return bytes(read_dense(reader, start + at, size, where))

    if length > limits.HOLE_BYTES:
        at, size = 0, length
        with suppress(CorruptCheckpoint):
            archive = Archive(fetch, length)
            at, size = archive.start("data.pkl"), archive.members["data.pkl"].size
        refuse_holes(reader, start + at, size, where)
    data = allocate(length, where)
    reader.read_into(start, [memoryview(data)])
    return data


def octets(array: Array) -> memoryview:
    """The memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


@dataclass(frozen=True, eq=False)
class _SimplePieces:
    """The values by which the simple ones among some pieces are read, row by row.

    Only rows of pieces with ``is_simple`` count. ``views``: the memory to read into; None if the
    target has no view of it. ``gaps``: bytes between the piece before and this one. ``digests``:
    the stored ones, if they are compared.
    """

    is_simple: list[bool]
    views: list[memoryview | None]
    starts: list[int]
    gaps: list[int]
    digests: list[bytes]

    @classmethod
    def of(cls, job: _Job, pieces: Pieces) -> _SimplePieces:
        is_simple = pieces.simple(job.checked)
        numbers = np.flatnonzero(is_simple)
        found: list[memoryview | None] = [None] * len(pieces)
        targets = job.plan.target[pieces.row[numbers]].tolist()
        taken = job.into.views(targets, pieces.nbytes[numbers].tolist())
        for number, view in zip(numbers.tolist(), taken, strict=True):
            found[number] = view
        starts = pieces.base + pieces.low
        gaps = starts[1:] - starts[:-1] - pieces.nbytes[:-1]
        digests: list[bytes] = []
        if job.checked:
            stored = job.digests(pieces.row, pieces.low // DIGEST_BLOCK)
            digests = stored.view(f"V{DIGEST_SIZE}").ravel().tolist()
        gaps_before = [0, *gaps.tolist()]
        return cls(is_simple.tolist(), found, starts.tolist(), gaps_before, digests)


class _FilePart:
    """Reads pieces of one file."""

    def __init__(self, job: _Job, reader: FileReader, simple: _SimplePieces) -> None:
        self.job = job
        self.reader = reader
        self.simple = simple
        self._dropped = memoryview(b"")
        self._window = memoryview(b"")
        # The bytes of the digest block that was read last.
        self._block = memoryview(b"")
        self._block_of = (-1, -1)  # chunk's start, number

    def fetch(self, pieces: Pieces, group: slice) -> None:
        """Read the pieces of one group.

        One call reads small neighbours. The bytes between them are dropped.
        """
        simple = self.simple
        if not simple.is_simple[group.start]:
            (piece,) = self.job.opened(pieces, group)
            self._fill(piece, piece.low, piece.array, piece.strides)
            self.job.into.close(piece.target, piece.box, piece.array)
            return
        found = simple.views[group]
        opened: list[tuple[_Piece, Array]] = []
        if None in found:
            missing = [number for number, view in enumerate(found) if view is None]
            numbers = group.start + np.array(missing)
            for i, piece in zip(missing, self.job.opened(pieces, numbers), strict=True):
                array = np.require(piece.array, requirements="C")
                opened.append((piece, array))
                found[i] = octets(array)
        places = cast("list[memoryview]", found)
        buffers: list[memoryview] = places[:1]
        for place, gap in zip(
            places[1:], simple.gaps[group.start + 1 : group.stop], strict=True
        ):
            if gap:
                self._dropped = self._dropped or memoryview(bytearray(SKIP))
                buffers.append(self._dropped[:gap])
            buffers.append(place)
        self.reader.read_into(simple.starts[group.start], buffers)
        if self.job.checked:
            expected = simple.digests[group]
            for number, place in enumerate(places):
                read = digest(place)
                if read != expected[number]:
                    row = group.start + number
                    block = int(pieces.low[row]) // DIGEST_BLOCK
                    self.job.check(int(pieces.row[row]), block, read)
        for piece, array in opened:
            if array is not piece.array:
                piece.array[...] = array
            self.job.into.close(piece.target, piece.box, piece.array)

    def _fill(self, piece: _Piece, low: int, array: Array, strides: list[int]) -> None:
        """Fill ``array``: its first element is at byte ``low``, its ``strides`` are in bytes."""
        outer = _outer_axes(array, strides)
        runs = math.prod(array.shape[:outer])
        if runs == 1:
            self._fill_run(piece, low, array)
            return
        # From the first byte of the region to its last: all of these are read if few are unwanted.
        span = array.itemsize
        for extent, stride in zip(array.shape, strides, strict=False):
            span += (extent - 1) * stride
        if not self.job.checked and span - array.nbytes > GAP * (runs - 1):
            for index in product(*map(range, array.shape[:outer])):
                start = low + sum(i * s for i, s in zip(index, strides, strict=False))
                self._fill_run(piece, start, array[index])
        elif span <= WINDOW:
            window = self._scratch(piece, low, span)
            array[...] = np.ndarray(
                array.shape, array.dtype, window, 0, strides[: array.ndim]
            )
        else:
            for start, part in self._slabs(low, array, strides):
                self._fill(piece, start, part, strides)

    def _fill_run(self, piece: _Piece, low: int, array: Array) -> None:
        """Fill ``array`` with consecutive bytes of the chunk."""
        if array.flags.c_contiguous:
            self._read(piece, low, octets(array))
        elif array.nbytes <= WINDOW:
            window = self._scratch(piece, low, array.nbytes)
            array[...] = np.ndarray(array.shape, array.dtype, window)
        else:
            for start, part in self._slabs(low, array, _c_strides(array)):
                self._fill_run(piece, start, part)

    def _slabs(
        self, low: int, array: Array, strides: list[int]
    ) -> Iterator[tuple[int, Array]]:
        """Slices along the outermost axis with several elements, of at most about a window each,
        with their first bytes. If checked, each is within one digest block where that is possible.
        """
        axis = next(i for i, extent in enumerate(array.shape) if extent > 1)
        before = (slice(None),) * axis
        stride = strides[axis]
        inner = array.itemsize  # bytes from the first to the last of one slice
        for i in range(axis + 1, array.ndim):
            inner += (array.shape[i] - 1) * strides[i]
        first = 0
        while first < array.shape[axis]:
            start = low + first * stride
            room = WINDOW
            if self.job.checked:
                room -= start % DIGEST_BLOCK
            count = max(1, (room - inner) // stride + 1)
            yield start, array[(*before, slice(first, first + count))]
            first += count

    def _scratch(self, piece: _Piece, low: int, count: int) -> memoryview:
        block, skipped = divmod(low, DIGEST_BLOCK)
        if self.job.checked and skipped + count <= DIGEST_BLOCK:
            return self._edge(piece, block)[skipped : skipped + count]
        if not self._window:
            self._window = memoryview(bytearray(WINDOW))
        window = self._window[:count]
        self._read(piece, low, window)
        return window

    def _read(self, piece: _Piece, low: int, place: memoryview) -> None:
        """Fill ``place`` with the chunk's bytes from ``low`` on; checked, whole blocks are read."""
        if not self.job.checked:
            self.reader.read_into(piece.base + low, [place])
            return
        position = low
        stop = low + len(place)
        whole = stop  # the end of the last block that is needed whole
        if stop < piece.length:
            whole -= stop % DIGEST_BLOCK
        while position < stop:
            block, skipped = divmod(position, DIGEST_BLOCK)
            if not skipped and position < whole:
                part = place[position - low : whole - low]
                found = read_digested(self.reader, piece.base + position, part)
                self.job.check(piece.row, block, found)
            else:
                part = place[position - low :][: DIGEST_BLOCK - skipped]
                part[:] = self._edge(piece, block)[skipped:][: len(part)]
            position += len(part)

    def _edge(self, piece: _Piece, block: int) -> memoryview:
        """A block that is needed in part.

        It is kept, because the next piece often needs the rest.
        """
        size = min(DIGEST_BLOCK, piece.length - block * DIGEST_BLOCK)
        if self._block_of != (piece.base, block):
            if not self._block:
                self._block = memoryview(bytearray(DIGEST_BLOCK))
            self._block_of = (-1, -1)
            found = read_digested(
                self.reader, piece.base + block * DIGEST_BLOCK, self._block[:size]
            )
            self.job.check(piece.row, block, found)
            self._block_of = (piece.base, block)
        return self._block[:size]


def _outer_axes(array: Array, strides: list[int]) -> int:
    """The number of leading axes; the trailing ones are one run of bytes in the chunk."""
    inner = array.itemsize
    for axis in range(array.ndim - 1, -1, -1):
        if array.shape[axis] > 1 and strides[axis] != inner:
            return axis + 1
        inner *= array.shape[axis]
    return 0


def _c_strides(array: Array) -> list[int]:
    return [
        array.itemsize * math.prod(array.shape[axis + 1 :])
        for axis in range(array.ndim)
    ]
