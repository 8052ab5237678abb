"""What the client saw of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """Times by ``time.perf_counter()``."""

    num_prompt: int = 0
    num_output: int = 0
    begin: float = 0.0  # when it was sent
    times: list[float] = field(default_factory=list)  # of the messages that carried tokens
    error: str | None = None
    num_gpu_decodes: int = 0
    num_cpu_decodes: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.begin

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.begin

    @property
    def itls(self) -> list[float]:
        """Seconds from message to message."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; ``None`` where there is no second."""
        if self.num_output < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output - 1)

    @property
    def per_token(self) -> float:
        """End-to-end latency over output length: arXiv 2411.01142's per-token latency."""
        return self.e2el / self.num_output
