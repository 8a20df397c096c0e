"""What can be set about the server; the engine's part is in `engine_settings`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server listens, what it lets in, and what it keeps.

    Attributes:
        host: Address to listen on; 0.0.0.0 for all of this machine's.
        port: Port to listen on; 0 for any that is free.
        tls_cert: Certificate chain (PEM); serves https together with tls_key.
        tls_key: Private key (PEM) of tls_cert.
        keys_file: File of API keys, one "name role sha256" a line, made by `valora-serve key`.
        api_key: One API key in the clear, for a quick start; it is hashed at once and may do
            everything.
        protect_metrics: Ask for a key for /metrics, too.
        allow_runtime_loading: Let admin keys load and unload adapters and bundles.
        adapter_folder: Folder below which adapters and bundles that are loaded at run time lie.
        state_file: Where run-time loads are remembered for the next start.
        max_body_bytes: Largest request body.
        max_image_bytes: Largest encoded image.
        max_image_pixels: Largest image, width x height.
        max_request_pixels: Pixels of all images and frames of a request together.
        max_held_pixels: Pixels of all requests under way; more have to wait (3 bytes each).
        max_images: Most images (frames apart) in a request.
        max_video_bytes: Largest encoded video.
        max_video_seconds: Longest video.
        video_frames: Frames that are taken from a video, evenly spaced.
        max_video_frames: Most frames that a request may hand over as single images.
        max_prompt_chars: Longest text of a request, in characters.
        max_n: Most answers to one request.
        media_hosts: Hosts that images and videos may be fetched from; none unless named.
        media_private: Let those hosts have private addresses (an intranet's store).
        media_folder: Folder below which file:// URLs may point; none unless named.
        media_seconds: Time limit for fetching one image or video, and for decoding a video.
        rate: Requests a minute that one key (or, without keys, one address) may make; 0 for any.
        burst: Requests that may come at once within that rate.
        max_waiting: Requests that may wait for the engine before others are told to come back.
        max_connections: Connections that are held at once; others get a 503.
        deadline: Seconds in which a request is answered unless it says so itself; 0 for no limit.
        deadlines: The same by domain, e.g. person=0.5.
        deadline_admission: Refuse requests on arrival that would miss their deadline at the
            recent speed.
        body_seconds: Time limit for a client to send its request.
        send_seconds: Time limit for a client to take a piece of the answer.
        drain_seconds: Time that running requests have to end after SIGTERM.
        temperature: Sampling temperature where a request names none; 0 is greedy.
        answer_tokens: Tokens that an answer may have where a request names no limit.
        log_level: debug, info, warning or error.
        log_format: text, or json (one object a line).
        otlp_endpoint: OpenTelemetry collector (OTLP over http) that gets a span per request.
        golden: Replay every bundle's golden examples before serving it.
        console: Serve the web console at /.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: str | None = None
    tls_key: str | None = None
    keys_file: str | None = None
    api_key: str | None = field(default=None, repr=False)
    protect_metrics: bool = False
    allow_runtime_loading: bool = False
    adapter_folder: str | None = None
    state_file: str = ".valora/serve/served.json"
    max_body_bytes: int = 64 * 2**20
    max_image_bytes: int = 20 * 2**20
    max_image_pixels: int = 40_000_000
    max_request_pixels: int = 160_000_000
    max_held_pixels: int = 1_600_000_000
    max_images: int = 64
    max_video_bytes: int = 48 * 2**20
    max_video_seconds: float = 600.0
    video_frames: int = 8
    max_video_frames: int = 64
    max_prompt_chars: int = 400_000
    max_n: int = 16
    media_hosts: tuple[str, ...] = ()
    media_private: bool = False
    media_folder: str | None = None
    media_seconds: float = 10.0
    rate: float = 0.0
    burst: int = 60
    max_waiting: int = 1024
    max_connections: int = 4096
    deadline: float = 0.0
    deadlines: dict[str, float] = field(default_factory=dict)
    deadline_admission: bool = True
    body_seconds: float = 60.0
    send_seconds: float = 30.0
    drain_seconds: float = 30.0
    temperature: float = 0.0
    answer_tokens: int = 256
    log_level: str = "info"
    log_format: str = "text"
    otlp_endpoint: str | None = None
    golden: bool = True
    console: bool = True

    def __post_init__(self) -> None:
        """Check what belongs together.

        Raises:
            ValueError: Naming the setting and the remedy.
        """
        positive = (
            "max_body_bytes max_image_bytes max_image_pixels max_request_pixels max_held_pixels "
            "max_images max_video_bytes "
            "max_video_seconds video_frames max_video_frames max_prompt_chars max_n media_seconds "
            "burst max_waiting max_connections body_seconds send_seconds answer_tokens"
        )
        for name in positive.split():
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be more than 0")
        for name in ("rate", "deadline", "drain_seconds", "temperature"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must not be negative")
        if not all(seconds > 0 for seconds in self.deadlines.values()):
            raise ValueError(f"deadlines is {self.deadlines}: every one must be more than 0 s")
        self._check_choices()
        self._check_access()

    def _check_choices(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}: name one from 0 to 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: name both or none")
        if self.log_level not in {"debug", "info", "warning", "error"}:
            raise ValueError(f"log_level is {self.log_level}: name debug, info, warning or error")
        if self.log_format not in {"text", "json"}:
            raise ValueError(f"log_format is {self.log_format}: name text or json")

    def _check_access(self) -> None:
        if self.api_key is not None and len(self.api_key) < 16:
            raise ValueError("api_key is short enough to guess: use at least 16 characters")
        if self.allow_runtime_loading and not self.adapter_folder:
            raise ValueError(
                "allow_runtime_loading lacks adapter_folder: name the folder below which adapters "
                "may be loaded from"
            )
        if self.allow_runtime_loading and not (self.api_key or self.keys_file):
            raise ValueError(
                "allow_runtime_loading lacks an API key: make one with `valora-serve key` and "
                "name keys_file"
            )
