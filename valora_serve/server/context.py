"""Objects of the server that endpoints have access to."""

from dataclasses import dataclass

from valora_serve.server.access.guard import Guard
from valora_serve.server.bodies import Bodies
from valora_serve.server.constrain import Grammars
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.media.reader import MediaReader
from valora_serve.server.resolving.on_request import OnRequest
from valora_serve.server.service import Service
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry.metrics import Metrics


@dataclass(frozen=True)
class ServerContext:
    """Parts of a running server, as endpoints use them."""

    settings: ServerSettings
    service: Service
    media: MediaReader
    grammars: Grammars
    metrics: Metrics
    served: ServedSet
    on_request: OnRequest | None  # None if requests load nothing
    guard: Guard
    bodies: Bodies
