"""A gpu worker without a model: it keeps token ids where K and V would be.

Every next token is a hash of the sequence's seed and of the *cached* tokens, read through the
tables of the plan. So a block that two sequences share, a swap that lost a token or a stale table
changes the output, which tests compare with ``generate``.
"""

from __future__ import annotations

import argparse
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.helpers.fake_riders import RideGroups

VOCAB = 251
PREFILL_GPU, PREFILL_CPU, DECODE_GPU, DECODE_CPU, RIDE_CPU = *range(4), 5
COMPUTED, SAMPLED, VOIDED = range(3)
Array = npt.NDArray[Any]


def next_token(seed: int, tokens: Array) -> int:
    """The only continuation of a sequence."""
    data = np.asarray(tokens, np.int32).tobytes() + int(seed).to_bytes(8, "little")
    return zlib.crc32(data) % VOCAB


def generate(seed: int, prompt: Sequence[int], count: int) -> list[int]:
    """What a request has to return, whatever the scheduler does."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(seed, np.array(tokens)))
    return tokens[len(prompt) :]


class FakeModel:
    """Answers plans and checks what a plan promises."""

    def __init__(
        self,
        tables: Any,
        num_gpu_blocks: int,
        num_cpu_pages: int,
        block_size: int,
        page_size: int,
        max_tokens: int,
        voids: Callable[[], bool] = lambda: False,
        groups: RideGroups | None = None,
    ) -> None:
        self.groups = groups or RideGroups(0, 0)
        self.tables = tables
        self.gpu = np.full((num_gpu_blocks, block_size), -1, np.int32)
        self.cpu = np.full((num_cpu_pages, page_size), -1, np.int32)
        self.max_tokens = max_tokens
        self.voids = voids
        self.last_plan = 0
        self.sampled: dict[int, int] = {}  # by slot, what its latest row that samples gave

    def answer(
        self, header: Array, rows: Array, swaps: Array, tokens: Array
    ) -> list[tuple[int, int]]:
        """Status and token of each row."""
        assert int(header["plan_id"]) > self.last_plan
        self.last_plan = int(header["plan_id"])
        n_rows = int(header["n_rows"].sum())
        rows, swaps = rows[:n_rows], swaps[: int(header["n_swaps"])]
        self._check(header, rows, swaps)
        for swap in sorted(swaps.tolist(), key=lambda swap: swap[1]):  # out before in
            self._swap(*swap[:3])
        void = [not self._fill(row, tokens) for row in rows]
        for row in rows:
            self._store(row, tokens)
        first_rider = len(rows) - int(header["n_rows"][2])
        riders = rows[first_rider:]
        void[first_rider:] = self.groups.pass_stages(riders, void[first_rider:], self.voids)
        self.groups.take_tokens(riders, tokens)
        results = [
            (VOIDED, -1) if lost else self._result(row)
            for row, lost in zip(rows, void, strict=True)
        ]
        answered = zip(rows["slot"].tolist(), results, strict=True)
        for sample, (slot, (status, token)) in zip(rows["sample"].tolist(), answered, strict=True):
            if status == SAMPLED:
                self.sampled[slot] = token
            elif sample:
                self.sampled.pop(slot, None)
        return results

    def _fill(self, row: Array, tokens: Array) -> bool:
        """Puts in what this slot sampled last; false: that was void."""
        if int(row["stage"]):
            tokens[int(row["token_at"])] = self.groups.token(row)
            return True
        at = int(row["token_at"])
        if int(tokens[at]) >= 0:
            return True
        assert int(row["n_new"]) == 1
        tokens[at] = self.sampled.get(int(row["slot"]), 0)
        return int(row["slot"]) in self.sampled

    def _check(self, header: Array, rows: Array, swaps: Array) -> None:
        slots = rows["slot"].tolist()
        assert len(set(slots)) == len(slots), "two rows of one slot"
        assert len(set(swaps["slot"].tolist())) == len(swaps), "two swaps of one slot"
        assert int(header["n_tokens"]) == int(rows["n_new"].sum()) <= self.max_tokens
        ends = np.cumsum(rows["n_new"])
        assert (rows["token_at"] == ends - rows["n_new"]).all()
        first, second, riders = header["n_rows"].tolist()
        assert first > 0 or second == 0
        assert second == 0 or riders == 0
        others = rows[: first + second]
        for kinds in (others["kind"][:first], others["kind"][first:]):
            assert (np.diff(kinds.astype(int)) >= 0).all(), "rows out of order"
        assert (others["kind"] <= DECODE_CPU).all()
        assert not others["stage"].any()
        assert not others["place"].any()
        self.groups.check(rows[first + second :])
        decodes = rows[rows["kind"] >= DECODE_GPU]
        assert (decodes["n_new"] == 1).all()
        assert (decodes["start"] > 0).all()
        self._check_ownership(rows)

    def _check_ownership(self, rows: Array) -> None:
        """No block or page is in the tables of two rows."""
        for kinds, cache in (((0, 2), self.gpu), ((1, 3, 5), self.cpu)):
            used: list[int] = []
            for row in rows[np.isin(rows["kind"], kinds)]:
                table = self.tables.block_table if cache is self.gpu else self.tables.page_table
                count = -(-int(row["start"] + row["n_new"]) // cache.shape[1])
                used += table[row["slot"]][:count].tolist()
            assert len(set(used)) == len(used), "a block has two owners"
            assert all(number < len(cache) for number in used)

    def _cells(self, slot: int, count: int, on_cpu: bool) -> tuple[Array, tuple[Array, Array]]:
        cache = self.cpu if on_cpu else self.gpu
        table = self.tables.page_table if on_cpu else self.tables.block_table
        positions = np.arange(count)
        return cache, (table[slot][positions // cache.shape[1]], positions % cache.shape[1])

    def _swap(self, slot: int, kind: int, n_tokens: int) -> None:
        source, source_at = self._cells(slot, n_tokens, on_cpu=kind == 1)
        target, target_at = self._cells(slot, n_tokens, on_cpu=kind == 0)
        target[target_at] = source[source_at]
        source[source_at] = -1

    def _store(self, row: Array, tokens: Array) -> None:
        start, n_new, at = int(row["start"]), int(row["n_new"]), int(row["token_at"])
        cache, cells = self._cells(int(row["slot"]), start + n_new, int(row["kind"]) % 2 == 1)
        assert (cache[cells][:start] >= 0).all(), "a token before the row is not in the cache"
        cache[cells[0][start:], cells[1][start:]] = tokens[at : at + n_new]

    def _result(self, row: Array) -> tuple[int, int]:
        if int(row["kind"]) == DECODE_CPU and self.voids():
            return VOIDED, -1
        if not row["sample"]:
            return COMPUTED, -1
        slot = int(row["slot"])
        count = int(row["start"] + row["n_new"])
        cache, cells = self._cells(slot, count, int(row["kind"]) % 2 == 1)
        return SAMPLED, next_token(int(self.tables.params[slot]["seed"]), cache[cells])


def main() -> None:
    """A process on the real seam: registers, serves the rings, leaves with the server."""
    import grpc

    from neo_native import ResultProducer, Sequences, StepConsumer, segments
    from protos import control_pb2 as pb
    from protos import control_pb2_grpc as rpc
    from protos.config import PLAN_MODES, EngineConfig
    from protos.credentials import key_metadata

    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True)
    parser.add_argument("--die-at", type=int, default=0, help="exit before answering this plan")
    parser.add_argument("--plan-ms", type=float, default=0.0, help="sleep of every plan")
    parser.add_argument("--modes", nargs="+", default=PLAN_MODES, help="kinds of plan it runs")
    parser.add_argument("--fail", action="store_true", help="exit before registering")
    arguments = parser.parse_args()
    if arguments.fail:
        raise SystemExit(7)
    with grpc.insecure_channel(arguments.server) as channel:
        stub = rpc.ControlStub(channel)
        reply = stub.RegisterGpuWorker(
            pb.RegisterGpuWorkerRequest(pid=os.getpid(), rank=0), metadata=key_metadata()
        )
        attached = segments.attach_all(reply.segments.instance_id, reply.segments.shm_dir or None)
        assert attached.try_lock(segments.gpu_worker_byte(0))
        config = EngineConfig.model_validate_json(reply.config_json)
        geometry = attached.geometry
        steps = StepConsumer(attached.steps, geometry)
        results = ResultProducer(attached.results, geometry)
        blocks = config.cache.num_gpu_blocks_override or 64
        model = FakeModel(
            Sequences(attached.sequences, geometry),
            blocks,
            int(geometry["n_pages"]),
            int(geometry["block_size"]),
            int(geometry["page_size"]),
            int(geometry["max_tokens"]),
            groups=RideGroups(int(geometry["ride_groups"]), int(geometry["ride_capacity"])),
        )
        ready = pb.ReportGpuReadyRequest(
            pid=os.getpid(),
            rank=0,
            num_gpu_blocks=blocks,
            device="fake",
            plan_modes=arguments.modes,
        )
        stub.ReportGpuReady(ready, metadata=key_metadata())
    given_up = segments.gpu_given_up_byte(0)
    while attached.is_locked(segments.SERVER_BYTE) and not attached.is_locked(given_up):
        if not steps.wait(0.2):
            continue
        step = steps.front()
        assert step is not None
        plan_id = int(step.header["plan_id"])
        if arguments.die_at and plan_id >= arguments.die_at:
            os._exit(9)
        time.sleep(arguments.plan_ms / 1000)
        answers = model.answer(step.header, step.rows, step.swaps, step.tokens)
        slot = results.acquire()
        assert slot is not None
        slot.header["plan_id"] = plan_id
        slot.header["n_rows"] = len(answers)
        slot.rows["status"][: len(answers)] = [status for status, _ in answers]
        slot.rows["token"][: len(answers)] = [token for _, token in answers]
        del step, slot
        steps.release()
        results.publish()


if __name__ == "__main__":
    main()
