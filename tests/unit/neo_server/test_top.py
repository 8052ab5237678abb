from __future__ import annotations

from io import StringIO

from rich.console import Console

from neo_server.top import Sample, view
from protos import inference_pb2 as pb


def sample(at_s: float, pid: int = 7, **counters: int) -> Sample:
    loads = pb.GetLoadsResponse(
        num_running_reqs=5,
        num_cpu_reqs=3,
        num_waiting_reqs=2,
        num_used_gpu_blocks=25,
        num_total_gpu_blocks=100,
        num_used_cpu_pages=3,
        num_total_cpu_pages=4,
        num_preemptions=6,
        iterations={"gpu_only": counters.pop("iterations")},
        **counters,
    )
    info = pb.GetServerInfoResponse(version="9.9", scheduling_policy="neo", device="cpu")
    info.workers.add(kind=pb.WorkerInfo.KIND_GPU, pid=3, busy_s=1.0 + 0.8 * at_s)
    info.workers.add(
        kind=pb.WorkerInfo.KIND_CPU_ATTN,
        row=1,
        pid=pid,
        num_threads=2,
        busy_s=at_s,
        kv_bytes_read=int(3e9 * at_s),
    )
    return Sample(at_s, loads, info)


def shown(before: Sample, after: Sample) -> str:
    out = StringIO()
    Console(file=out, width=100).print(view("demo", before, after))
    return " ".join(out.getvalue().split())


def test_rates_are_over_the_time_between_two_looks() -> None:
    before = sample(10.0, num_output_tokens=100, num_gpu_decodes=50, iterations=20)
    after = sample(
        12.0, num_output_tokens=180, num_gpu_decodes=110, num_cpu_decodes=20, iterations=50
    )
    text = shown(before, after)
    assert "NEO 9.9 demo neo on cpu" in text
    assert "5 running (3 CPU-requests), 2 waiting" in text
    assert "tokens/s 40.0" in text
    assert "30.0 GPU, 10.0 CPU, 25% on the CPU" in text
    assert "25% 25 of 100 blocks" in text
    assert "75% 3 of 4 pages" in text
    assert "15.0 gpu_only" in text
    assert "6 preemptions" in text
    assert "gpu 0 3 80%" in text
    assert "cpu-attn 1 7 2 50% 3.00 GB/s" in text


def test_a_server_or_worker_that_began_anew_counts_from_zero() -> None:
    before = sample(10.0, num_output_tokens=1000, iterations=9)
    after = sample(11.0, pid=8, num_output_tokens=5, iterations=2)
    text = shown(before, after)
    assert "tokens/s 5.0" in text
    assert "cpu-attn 1 8 2 550% 33.00 GB/s" in text  # all that the new one ever did
    assert "0.0 GPU, 0.0 CPU " in text


def test_without_anything_there_is_nothing_to_divide_by() -> None:
    empty = Sample(1.0, pb.GetLoadsResponse(), pb.GetServerInfoResponse())
    text = shown(empty, empty)
    assert "0% 0 of 0 blocks" in text
    assert "iterations/s 0 " in text
