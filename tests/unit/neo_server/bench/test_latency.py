from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from neo_server.bench.device_rates import Rates, measure_rates
from neo_server.bench.drive import Recorder
from neo_server.bench.floor import decode_floor, prefill_floor, shape_of
from neo_server.bench.latency import LatencyFlags, Times, figures, floors, run, times_of
from neo_server.errors import ConfigurationError, NeoError
from neo_server.launch import Options, resolve
from protos.model_config import parse_model_config
from tests.unit.neo_server.conftest import CONFIG

# 2 layers: q and o 64 x 64 each, k and v 64 x 32 each, MLP 3 x 64 x 128; head 400 x 64.
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
HEAD = 400 * 64
SHAPE = shape_of(parse_model_config(CONFIG, {}), itemsize=2)


def test_the_decode_floor_reads_weights_and_cache_once() -> None:
    rates = Rates(bytes_per_s=1e6, flops=1e30)
    floor = decode_floor(SHAPE, rates, batch=3, context=10)
    assert floor.weight_bytes == 2 * (LAYERS + HEAD)
    assert floor.kv_bytes == 3 * 10 * 2 * (2 * 2 * 16) * 2  # rows, layers, K and V of 2 heads
    assert floor.seconds == pytest.approx((floor.weight_bytes + floor.kv_bytes) / 1e6)
    assert floor.flops == 2 * 3 * (LAYERS + HEAD) + 2 * 3 * 10 * (2 * 2 * 64)


def test_the_prefill_floor_is_arithmetic_over_causal_pairs() -> None:
    rates = Rates(bytes_per_s=1e30, flops=1e6)
    floor = prefill_floor(SHAPE, rates, batch=2, length=5)
    assert floor.flops == 2 * (10 * LAYERS + 2 * HEAD) + 2 * (2 * 2 * 64) * 2 * 15
    assert floor.seconds == pytest.approx(floor.flops / 1e6)


def test_decode_iterations_count_from_the_last_first_token() -> None:
    early, late = Recorder(lambda: None), Recorder(lambda: None)
    early.times, early.device_times = [2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0]
    late.times, late.device_times = [4.0, 5.0, 7.0], [3.0, 3.5, 4.75]
    assert times_of(1.0, [early, late]) == Times(3.0, (1.0, 2.0), (0.5, 1.25))
    line = figures([Times(3.0, (1.0, 2.0), (0.5, 1.25)), Times(5.0, (3.0,), (0.75,))])
    assert (line["prefill_s"], line["decode_s"], line["decode_device_s"]) == (4.0, 2.0, 0.75)
    assert line["num_decode_iterations"] == 3
    assert 2.0 < line["decode_p99_s"] <= 3.0


def test_the_line_says_how_far_above_the_floor_it_is(tiny_model: Path) -> None:
    resolved = resolve(Options(model=str(tiny_model), dtype="float16"), lambda: False)
    flags = LatencyFlags(batch_size=3, input_len=6, output_len=8)
    rates = Rates(bytes_per_s=1e6, flops=1e7)
    line = floors(resolved, flags, rates, {"decode_s": 2.0, "prefill_s": 4.0})
    decode = decode_floor(SHAPE, rates, 3, 10)
    assert line["decode_roofline_s"] == decode.seconds
    assert line["decode_over_roofline"] == pytest.approx(2.0 / decode.seconds)
    prefill = prefill_floor(SHAPE, rates, 3, 6)
    assert line["prefill_flops_share"] == pytest.approx(prefill.flops / 4.0 / 1e7)
    assert line["prefill_roofline"]["flops"] == prefill.flops


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch_size": 9}, "--batch-size is 9; it must be at most max_num_seqs, 8"),
        ({"output_len": 1}, "--output-len is 1; it must be at least 2"),
        ({"input_len": 250}, "378 tokens together; max_model_len is 256"),
    ],
)
def test_an_impossible_batch_is_refused_before_anything_starts(
    tiny_model: Path, fields: dict[str, int], words: str
) -> None:
    options = Options(model=str(tiny_model), device="cpu", max_num_seqs=8)
    with pytest.raises(ConfigurationError, match=words):
        run(options, LatencyFlags(**fields), Console(stderr=True))


def test_rates_are_measured_in_a_process_of_their_own() -> None:
    rates = measure_rates("cpu", "float32")
    assert rates.bytes_per_s > 0.0
    assert rates.flops > 0.0
    with pytest.raises(NeoError, match="measuring the device"):
        measure_rates("abacus", "float32")
