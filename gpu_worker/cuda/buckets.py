"""Which shapes of an iteration have a CUDA graph, and which of them runs a plan.

Row kinds, lengths, tables and epochs come from device memory, so that the graph of a bucket serves
any split between prefills, GPU- and CPU-requests. What fits no bucket (more than ``MIXED_TOKENS``
tokens, prefills in the second sub-batch, riders beside two sub-batches or rows of kind decode_cpu,
more later chunks of CPU prefills than one) runs the same launches one by one: there the device
mostly takes longer than the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from gpu_worker.cuda.plan import PAD_TILES, TILE_Q, CpuChunk, HostBatch, HostPlan
from protos.config import PlanMode

SMALL = (1, 2, 4, 8)
STEP = 8  # between buckets up to 64 rows; then 16 up to 128, then 32
PAIRS = (8, 32, 64, 128, 256)  # buckets of each batch where there are two of decodes
# Buckets of a second batch beside one with prefills. Few: up to some 300 tokens (H200) a linear
# stage takes as long as reading its weights, and rows that are none cost little else.
MATES = (64, 256)
MIXED_TOKENS = 2048  # of an iteration with prefills
MIXED_ROWS = ((64, 4), (256, 1))  # decode rows beside prefills, and splits of each
MIXED_PREFILLS = PAD_TILES  # rows; each may begin one tile more
MIXED_CPU_ROWS = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of one sub-batch's launches; a captured graph serves any batch that fits them."""

    channel: int
    tokens: int
    gpu_rows: int
    cpu_rows: int = 0
    to_cpu: bool = False
    tiles: int = 0  # of prefill attention
    sampled: int = 0
    cpu_chunks: tuple[CpuChunk, ...] = ()
    chunk_place: bool = False  # for one such chunk, which the metadata tells of, if there is one
    splits: int = 0  # of each sequence in decode attention; 0: by the number of rows
    lead: int = 0  # of the tokens: places of riders before the rows

    @staticmethod
    def of(batch: HostBatch) -> Shape:
        """Exactly this batch."""
        return Shape(
            channel=batch.channel,
            tokens=batch.lead + batch.n_tokens,
            gpu_rows=batch.n_gpu_rows,
            cpu_rows=batch.n_cpu_rows,
            to_cpu=batch.to_cpu,
            tiles=batch.n_tiles,
            sampled=batch.n_sampled,
            cpu_chunks=batch.cpu_chunks,
            lead=batch.lead,
        )

    @property
    def has_chunk(self) -> bool:
        """There may be tiles of later chunks of CPU prefills."""
        return self.chunk_place or bool(self.cpu_chunks)

    def with_riders(self, capacity: int) -> Shape:
        """The same with places for riders."""
        return replace(
            self,
            tokens=self.tokens + capacity,
            sampled=self.sampled + capacity,
            lead=capacity,
        )


Key = tuple[Shape, ...]


def buckets(most: int) -> list[int]:
    """Numbers of decode rows that have a graph, the last at least ``most``."""
    found = [n for n in SMALL if n <= most]
    while not found or found[-1] < most:
        last = found[-1] if found else 0
        found.append(last + (STEP if last < 64 else 16 if last < 128 else 32))
    return found


def mixed_buckets(most: int) -> list[int]:
    """Tokens of iterations with prefills; a matrix product takes tokens by the 64 anyhow."""
    return _steps(most, ((512, 64), (1024, 128)))


def pair_buckets(most: int) -> list[int]:
    """Tokens of a first batch with prefills where there are two."""
    return _steps(most, ((1024, 128),))


def ride_buckets(most: int, capacity: int) -> list[int]:
    """Tokens beside the places of riders: with these as many as a product takes at a time."""
    mixed = mixed_buckets(most)
    found = [tokens - capacity for tokens in mixed if tokens > capacity]
    if not found or found[-1] < min(most, MIXED_TOKENS):
        found.append(mixed[-1])
    return found


def _steps(most: int, upto: Sequence[tuple[int, int]]) -> list[int]:
    """``upto``: bounds, and the step below each; then 256."""
    found: list[int] = []
    while not found or found[-1] < min(most, MIXED_TOKENS):
        last = found[-1] if found else 0
        found.append(last + next((step for bound, step in upto if last < bound), 256))
    return found


def bucket_of(n: int, among: Sequence[int]) -> int | None:
    """The least bucket that holds ``n``."""
    return next((bucket for bucket in among if bucket >= n), None)


def decode_shape(channel: int, rows: int, cpu: bool) -> Shape:
    """Decodes alone."""
    return Shape(channel, rows, rows, rows if cpu else 0, cpu, sampled=rows)


def mixed_splits(rows: int) -> int:
    """Of each sequence in decode attention beside prefills."""
    return next((splits for held, splits in MIXED_ROWS if rows <= held), 1)


def most_tiles(tokens: int) -> int:
    """Of prefill attention in a bucket of so many tokens."""
    return -(-tokens // TILE_Q) + MIXED_PREFILLS


def mixed_shape(tokens: int, rows: int, splits: int, cpu: bool) -> Shape:
    """Prefills and decodes in one batch."""
    return Shape(
        channel=0,
        tokens=tokens,
        gpu_rows=rows,
        cpu_rows=MIXED_CPU_ROWS if cpu else 0,
        to_cpu=cpu,
        tiles=most_tiles(tokens),
        sampled=rows + MIXED_PREFILLS,
        chunk_place=cpu,
        splits=splits,
    )


class Buckets:
    """The shapes that have a graph under given limits."""

    def __init__(self, max_rows: int, max_tokens: int, ride_capacity: int = 0) -> None:
        """``ride_capacity``: 0 where there are no riders."""
        self._ride_capacity = ride_capacity
        self._rows = buckets(max_rows)
        self._pairs = [n for n in PAIRS if n <= self._rows[-1]]
        self._mates = list(dict.fromkeys(min(n, self._rows[-1]) for n in MATES))
        self._mixed = mixed_buckets(max_tokens)
        self._ride_mixed = ride_buckets(max_tokens, ride_capacity)
        self._pair_mixed = pair_buckets(max_tokens)
        fewer = (0, *(n for n, _ in MIXED_ROWS))  # rows that the bucket before holds
        self._mixed_rows = [
            pair for pair, held in zip(MIXED_ROWS, fewer, strict=False) if held < max_rows
        ]

    def keys(self, modes: Collection[PlanMode]) -> Iterator[Key]:
        """Those of these kinds of plan; a single batch with CPU prefills counts as one_batch."""
        if "gpu_only" in modes:
            yield from self._single_keys(cpu=False)
        if "one_batch" in modes:
            yield from self._single_keys(cpu=True)
        if "two_batches" in modes:
            yield from self._pair_keys()
        if "piggyback" in modes and self._ride_capacity:
            yield from self._ride_keys()

    def _rows_beside(self, among: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Buckets of tokens with those of decode rows that so many tokens may need, and splits."""
        for tokens in among:
            held = 0
            for rows, splits in self._mixed_rows:
                if held < tokens:
                    yield tokens, rows, splits
                held = rows

    def _single_keys(self, cpu: bool) -> Iterator[Key]:
        for n in self._rows:
            yield (decode_shape(0, n, cpu),)
        for tokens, rows, splits in self._rows_beside(self._mixed):
            yield (mixed_shape(tokens, rows, splits, cpu),)

    def _pair_keys(self) -> Iterator[Key]:
        for a in self._pairs:
            for b in self._pairs:
                yield decode_shape(0, a, True), decode_shape(1, b, True)
        for tokens, rows, splits in self._rows_beside(self._pair_mixed):
            for b in self._mates:
                yield mixed_shape(tokens, rows, splits, True), decode_shape(1, b, True)

    def _ride_keys(self) -> Iterator[Key]:
        for n in self._rows:
            yield (self._ridden(decode_shape(0, n, cpu=False)),)
        # Prefills straight into the CPU-cache feed the waves.
        for tokens, rows, splits in self._rows_beside(self._ride_mixed):
            for cpu in (False, True):
                yield (self._ridden(mixed_shape(tokens, rows, splits, cpu)),)

    def _ridden(self, shape: Shape) -> Shape:
        return replace(shape, cpu_rows=0).with_riders(self._ride_capacity)

    def key_of(self, plan: HostPlan) -> Key | None:
        """The least shape that holds this plan's rows, or None where there is none."""
        if [batch.channel for batch in plan.batches] != list(range(len(plan.batches))):
            return None
        if plan.rides is not None and (len(plan.batches) > 1 or plan.batches[0].n_cpu_rows):
            return None
        if len(plan.batches) == 2:
            return self._pair_of(*plan.batches)
        if not plan.batches:
            return None
        shape = self._single_of(plan.batches[0], plan.rides is not None)
        return (shape,) if shape else None

    def _single_of(self, batch: HostBatch, riders: bool) -> Shape | None:
        if _decodes_only(batch):
            shape = self._decode_shape_of(batch, self._rows, batch.n_cpu_rows > 0)
        else:
            among = self._ride_mixed if riders else self._mixed
            shape = self._mixed_shape_of(batch, among, batch.to_cpu)
        return self._ridden(shape) if shape is not None and riders else shape

    def _pair_of(self, first: HostBatch, second: HostBatch) -> Key | None:
        """Two batches; CPU rows may be in both. Prefills are in the first."""
        if not _decodes_only(second):
            return None
        if _decodes_only(first):
            shape = self._decode_shape_of(first, self._pairs, cpu=True)
            mate = self._decode_shape_of(second, self._pairs, cpu=True)
        else:
            shape = self._mixed_shape_of(first, self._pair_mixed, cpu=True)
            mate = self._decode_shape_of(second, self._mates, cpu=True)
        return (shape, mate) if shape and mate else None

    @staticmethod
    def _decode_shape_of(batch: HostBatch, among: Sequence[int], cpu: bool) -> Shape | None:
        bucket = bucket_of(batch.n_tokens, among)
        return decode_shape(batch.channel, bucket, cpu) if bucket else None

    def _mixed_shape_of(self, batch: HostBatch, among: Sequence[int], cpu: bool) -> Shape | None:
        tokens = bucket_of(batch.n_tokens, among)
        wanted = max(batch.n_gpu_rows, batch.n_sampled - batch.n_ride_sampled - MIXED_PREFILLS)
        rows = next((pair for pair in self._mixed_rows if pair[0] >= wanted), None)
        if tokens is None or rows is None or len(batch.cpu_chunks) > 1:
            return None
        if batch.n_cpu_rows > MIXED_CPU_ROWS or batch.n_tiles > most_tiles(tokens):
            return None
        return mixed_shape(tokens, *rows, cpu)


def _decodes_only(batch: HostBatch) -> bool:
    """Decodes that are all sampled from."""
    return batch.decodes_only and batch.n_sampled - batch.n_ride_sampled == batch.n_tokens
