"""What the services share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from neo_server.chat_template import ChatTemplate
from neo_server.engine import Engine
from neo_server.errors import NotReadyError
from neo_server.gpu_client import GpuClient
from neo_server.launch import Options, Resolved
from neo_server.plan import Place
from neo_server.shared_memory import SharedMemory
from neo_server.supervisor import Supervisor
from neo_server.tokenizer import AnyTokenizer


@dataclass(slots=True)
class ServerState:
    """One server's parts; ``engine`` comes when the gpu worker is ready and warmed up."""

    options: Options
    resolved: Resolved
    tokenizer: AnyTokenizer
    chat_template: ChatTemplate | None
    memory: SharedMemory
    gpu: GpuClient
    supervisor: Supervisor | None = None
    engine: Engine | None = None
    http_address: str = ""  # where HTTP is served
    started: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))  # by the clock on the wall

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.options.served_model_name or self.options.model

    @property
    def is_serving(self) -> bool:
        """As health says."""
        return not self.trouble()

    def trouble(self) -> str:
        """Why no request can be served; "": warm, not draining, every needed worker lives."""
        if self.engine is None:
            return "the model is still loading"
        if not self.engine.accepting:
            return "the server is shutting down"
        if not self.gpu.is_ready:
            return "the gpu worker is gone"
        if self.supervisor is not None and self.supervisor.gpu_worker_is_stopped:
            return "the gpu worker is stopped"
        if self.gpu.is_late:
            return f"the gpu worker has not answered a plan for {self.gpu.waited_s:.1f} s"
        policy = self.engine.scheduler.policy
        if policy.places == {Place.CPU} and not self.memory.cpu_pool.beating_workers():
            return f"no cpu-attention worker lives, and {policy.name} has CPU-requests only"
        return ""

    def serving_engine(self) -> Engine:
        """The engine, or ``NotReadyError``."""
        if self.engine is None:
            raise NotReadyError("the model is still loading")
        return self.engine
