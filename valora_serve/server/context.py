"""What all routes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from valora_serve.server.constrain import Grammars
    from valora_serve.server.loading.served_set import ServedSet
    from valora_serve.server.media.reader import MediaReader
    from valora_serve.server.service import Service
    from valora_serve.server.settings import ServerSettings
    from valora_serve.server.telemetry.metrics import Metrics


@dataclass(frozen=True)
class ServerContext:
    """Parts of a running server.

    Attributes:
        settings: Its settings.
        service: Asks the engine.
        media: Reads images and videos.
        grammars: Makes constraints.
        metrics: What is counted.
        served: What was loaded at run time.
        started: When it started, seconds of `time.monotonic`.
    """

    settings: ServerSettings
    service: Service
    media: MediaReader
    grammars: Grammars
    metrics: Metrics
    served: ServedSet
    started: float
