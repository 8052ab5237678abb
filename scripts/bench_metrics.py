"""Microseconds that one iteration's token times take to record, here and with prometheus_client."""

from __future__ import annotations

import argparse
import timeit
from array import array
from itertools import count

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram

from neo_server.latencies import Latencies
from neo_server.request import OutputStream, Request, SamplingParams, Sequence, StopConditions
from neo_server.tokenizer import NoDetokenizer, StopStrings

_REPEATS, _ITERATIONS = 50, 20


def requests_of(rows: int) -> list[Request]:
    """That many requests in the middle of their output."""
    return [
        Request(
            *(f"r{i}", Sequence(i, array("i", [1]), 1, SamplingParams(0)), StopConditions(1)),
            *(NoDetokenizer(), StopStrings(()), OutputStream()),
        )
        for i in range(rows)
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    requests = requests_of(parser.parse_args().rows)
    clock = count(1)
    latencies = Latencies()
    registry = CollectorRegistry()
    bounds = latencies.inter_token.bounds
    histogram = PrometheusHistogram("gap", "Between tokens.", registry=registry, buckets=bounds)
    latest = dict.fromkeys(range(len(requests)), 0)

    def batched() -> None:
        latencies.note_tokens(requests, next(clock) * 0.03)

    def one_by_one() -> None:
        now = next(clock)
        for i, before in latest.items():
            histogram.observe((now - before) * 0.03)
            latest[i] = now

    for name, work in (("batched", batched), ("observe per token", one_by_one)):
        best = min(timeit.repeat(work, repeat=_REPEATS, number=_ITERATIONS)) / _ITERATIONS
        print(f"{name}: {best * 1e6:.1f} us for {len(requests)} tokens")


if __name__ == "__main__":
    main()
