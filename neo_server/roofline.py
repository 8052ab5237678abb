"""A cost model from published hardware figures: the larger of compute and memory time.

The same few efficiency factors serve every GPU and CPU; docs/simulation.md gives their source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from neo_server.errors import ConfigurationError

Positive = Annotated[float, Field(gt=0.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Efficiency(_Frozen):
    """Shares of the published peaks that are reached; one set for all machines."""

    gpu_flops: Share = 0.70
    gpu_bandwidth: Share = 0.75
    cpu_bandwidth: Share = 0.65
    pcie_bandwidth: Share = 0.80


class Hardware(_Frozen):
    """One machine. Sums over its GPUs."""

    name: str
    gpu: str
    num_gpus: int = 1
    gpu_tflops: Positive  # dense, 16-bit, fp32 accumulation where published so
    gpu_bandwidth_gbs: Positive
    gpu_memory_gb: Positive
    cpu: str
    cpu_bandwidth_gbs: Positive  # the share of the socket's that the instance's cores have
    cpu_memory_gb: Positive  # for the CPU-cache
    pcie_gbs: Positive  # one direction
    handoff_us: Positive = 20.0  # publish, wait and read-back of one layer
    overhead_ms: Positive = 1.0  # fixed cost of an iteration
    sources: dict[str, str]  # of the figures, by field


class ModelShape(_Frozen):
    """What the roofline needs of a model."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int
    itemsize: int = 2

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        out = self.heads * self.head_dim * self.hidden
        return qkv + out + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All weights; embedding and head apart."""
        return self.layers * self.layer_parameters + 2 * self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize

    def tokens_in(self, size: float) -> int:
        """Tokens of all layers whose K and V ``size`` bytes hold."""
        return int(size / (self.kv_bytes * self.layers))


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(name="llama-2-7b", layers=32, hidden=4096, intermediate=11008, heads=32,
                   kv_heads=32, vocab=32000),
        ModelShape(name="llama-3.1-8b", layers=32, hidden=4096, intermediate=14336, heads=32,
                   kv_heads=8, vocab=128256),
        ModelShape(name="llama-3.1-70b", layers=80, hidden=8192, intermediate=28672, heads=64,
                   kv_heads=8, vocab=128256),
    )
}  # fmt: skip


def load_hardware(name: str) -> Hardware:
    """A built-in profile by name, or a JSON file. Raises ``ConfigurationError``."""
    folder = resources.files("neo_server") / "hardware"
    path = Path(name) if name.endswith(".json") else folder / f"{name}.json"
    try:
        return Hardware.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = sorted(p.name[:-5] for p in folder.iterdir() if p.name.endswith(".json"))
        raise ConfigurationError(
            f"hardware is {name!r}; known are {', '.join(known)}, or a .json file"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"hardware {name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds, of a layer where not said otherwise: worked out once, since plans ask often."""

    weights_s: float  # to read them
    linear_s: float  # of a token
    pair_s: float  # of a query-key pair
    gpu_token_s: float  # of K and V read
    cpu_token_s: float
    handed_row_s: float
    moved_token_s: float
    vocab_s: float  # to read the head's weights, once an iteration
    logits_s: float  # of a row, once an iteration

    @staticmethod
    def of(cost: RooflineCost) -> _Rates:
        """Bytes over bandwidths, operations over FLOP/s."""
        hardware, model, share = cost.hardware, cost.model, cost.efficiency
        flops = hardware.gpu_tflops * 1e12 * share.gpu_flops
        bandwidth = hardware.gpu_bandwidth_gbs * 1e9 * share.gpu_bandwidth
        cpu = hardware.cpu_bandwidth_gbs * 1e9 * share.cpu_bandwidth
        pcie = hardware.pcie_gbs * 1e9 * share.pcie_bandwidth
        handed = (2 * model.heads + 2 * model.kv_heads) * model.head_dim * model.itemsize
        cached = model.kv_bytes * cost.kv_scale
        return _Rates(
            model.layer_parameters * model.itemsize / bandwidth,
            2.0 * model.layer_parameters / flops,
            4.0 * model.heads * model.head_dim / flops,
            model.kv_bytes / bandwidth,
            *(cached / cpu, handed / pcie, cached / pcie),
            model.vocab * model.hidden * model.itemsize / bandwidth,
            2.0 * model.vocab * model.hidden / flops,
        )


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """``CostModel`` for one model on one machine."""

    hardware: Hardware
    model: ModelShape
    efficiency: Efficiency = field(default_factory=Efficiency)
    kv_scale: float = 1.0  # bytes of the CPU-cache against the GPU's: 0.5 for int8
    has_cpu_workers: bool = True
    _rates: _Rates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rates", _Rates.of(self))

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self.model.layers

    @property
    def overlaps_transfers(self) -> bool:
        """Copies run on their own stream."""
        return True

    @property
    def ride_places(self) -> float:
        """No padding is modelled."""
        return 0.0

    def linear(self, tokens: float) -> float:
        """Weights read once, or two operations per weight and token."""
        return max(self._rates.weights_s, self._rates.linear_s * tokens)

    def prefill_attn(self, pairs: float) -> float:
        """Two products over each pair."""
        return self._rates.pair_s * pairs

    def gpu_attn(self, rows: float, tokens: float) -> float:
        """K and V read once."""
        return self._rates.gpu_token_s * tokens

    def cpu_attn(self, rows: float, tokens: float) -> float:
        """K and V read once, from host memory."""
        return self._rates.cpu_token_s * tokens if self.has_cpu_workers else float("inf")

    def ride_attn(self, rows: float, tokens: float) -> float:
        """The same bytes."""
        return self.cpu_attn(rows, tokens)

    def handoff(self, rows: float) -> float:
        """Signalling, and Q, K, V out and O back over PCIe."""
        return self.hardware.handoff_us * 1e-6 + self._rates.handed_row_s * rows

    def ride_handoff(self, rows: float) -> float:
        """The same; what empty groups cost is not modelled."""
        return self.handoff(rows) if rows else 0.0

    def transfer(self, tokens: float) -> float:
        """K and V over PCIe."""
        return self._rates.moved_token_s * tokens

    def staging(self, tokens: float) -> float:
        """The same: none of it is hidden."""
        return self.transfer(tokens)

    def storing(self, tokens: float) -> float:
        """A copy beside the iteration moves it."""
        return 0.0

    def head(self, sampled: float) -> float:
        """Logits, and what every iteration costs."""
        fixed = self.hardware.overhead_ms * 1e-3
        if not sampled:
            return fixed
        return fixed + max(self._rates.vocab_s, self._rates.logits_s * sampled)

    def with_cpu_bandwidth(self, factor: float) -> RooflineCost:
        """The same machine with another CPU."""
        hardware = self.hardware.model_copy(
            update={"cpu_bandwidth_gbs": self.hardware.cpu_bandwidth_gbs * factor}
        )
        return replace(self, hardware=hardware)


def gpu_cache_tokens(hardware: Hardware, model: ModelShape, utilization: float = 0.9) -> int:
    """Tokens for which the GPUs' memory has room beside weights and 2 GB of activations each."""
    weights = model.parameters * model.itemsize
    left = hardware.gpu_memory_gb * 1e9 * utilization - weights - 2e9 * hardware.num_gpus
    return max(int(left // (model.kv_bytes * model.layers)), 0)
