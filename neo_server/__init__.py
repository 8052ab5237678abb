"""The server: public API, router, scheduler, supervision of the workers. It touches no tensor.

For users' programs: ``LLM`` and ``AsyncLLM`` run an engine, ``Client`` and ``AsyncClient`` use a
server that runs; see docs/python.md. They are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neo_server.async_llm import AsyncLLM
    from neo_server.client import AsyncClient, Client
    from neo_server.errors import NeoError
    from neo_server.llm import LLM
    from neo_server.outputs import CompletionOutput, Delta, RequestOutput
    from neo_server.params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "Client",
    "CompletionOutput",
    "Delta",
    "NeoError",
    "RequestOutput",
    "SamplingParams",
]
_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "AsyncClient": "client",
    "Client": "client",
    "NeoError": "errors",
    "CompletionOutput": "outputs",
    "Delta": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
