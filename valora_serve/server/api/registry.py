"""Endpoints by name: functions that take the `ServerContext` and return a FastAPI router.

Another package adds one with an entry point in the group ``valora.endpoints``.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from valora_data.registry import Registry
from valora_serve.server.context import ServerContext

Endpoint = Callable[[ServerContext], APIRouter]

BUILTIN = {
    "chat": "valora_serve.server.api.chat:router",
    "completions": "valora_serve.server.api.completions:router",
    "responses": "valora_serve.server.api.openai_responses:router",
    "embeddings": "valora_serve.server.api.completions:embeddings",
    "vision": "valora_serve.server.api.vision:router",
    "models": "valora_serve.server.api.models:router",
    "contexts": "valora_serve.server.api.models:contexts",
    "examples": "valora_serve.server.api.models:examples",
    "system": "valora_serve.server.api.system:router",
}
ENDPOINTS: Registry[Endpoint] = Registry("valora.endpoints", "endpoint", BUILTIN)
