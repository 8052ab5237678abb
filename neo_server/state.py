"""What the services share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from neo_server.chat_template import ChatTemplate
from neo_server.engine import Engine
from neo_server.errors import NotReadyError
from neo_server.gpu_client import GpuClient
from neo_server.launch import Options, Resolved
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
    started: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))  # by the clock on the wall

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.options.served_model_name or self.options.model

    @property
    def is_serving(self) -> bool:
        """As health says: warmed up, with a gpu worker, not draining."""
        return self.engine is not None and self.engine.accepting and self.gpu.is_ready

    def serving_engine(self) -> Engine:
        """The engine, or ``NotReadyError``."""
        if self.engine is None:
            raise NotReadyError("the model is still loading")
        return self.engine
