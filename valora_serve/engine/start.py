"""Starts an engine; `valora-serve` and every replica do it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from valora_serve.engine.async_engine import AsyncEngine
    from valora_serve.engine.settings import EngineSettings


async def start_engine(settings: EngineSettings) -> AsyncEngine:
    """Load the base model and start an engine, without adapters.

    Raises:
        ServeError: A setting cannot be kept on this machine.
    """
    from transformers.utils import logging

    from valora_serve.engine.async_engine import AsyncEngine
    from valora_serve.engine.engine import Engine

    logging.disable_progress_bar()
    return AsyncEngine(await asyncio.to_thread(Engine, settings))
