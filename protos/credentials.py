"""How clients and workers show the server's key (``--api-key``)."""

from __future__ import annotations

import os

API_KEY_VARIABLE = "NEO_API_KEY"


def key_metadata(api_key: str | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call; without ``api_key`` the environment's key, without either none."""
    key = api_key or os.environ.get(API_KEY_VARIABLE)
    return (("authorization", f"Bearer {key}"),) if key else ()
