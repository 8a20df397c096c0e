"""Settings of the HTTP server."""

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from valora_serve.errors import SettingsError

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Server: address, access, limits, deadlines, logs.

    Attributes:
        host: Address to listen on; 0.0.0.0 for all of this machine's addresses.
        port: Port to listen on; 0 for any free port.
        unix_socket: Path of a Unix socket to listen on, instead of host and port.
        root_path: Path below which a reverse proxy shows the server, e.g. /valora.
        trusted_proxies: Addresses and networks of reverse proxies whose X-Forwarded-For counts;
            unix for those that use unix_socket; none by default.
        tls_cert: Certificate chain (PEM); with tls_key, the server speaks https.
        tls_key: Private key (PEM) of tls_cert.
        keys_file: File of API keys, one "name role sha256 [model...]" per line, made by
            `valora-serve key`.
        api_key: One API key with the role admin, in the clear, for a quick start.
        allowed_hosts: Host names, besides localhost, under which a server without API keys answers;
            * for any.
        allowed_origins: Origins, e.g. https://app.example.org, whose web pages may send requests; *
            for any.
        protect_metrics: Require an API key for /metrics as well.
        cache_sharing: Who shares cached prompts and images: key (requests of the same API key, and
            of the same cache_salt if they have one), salt (the same, but a cache_salt is shared by
            all keys that send it) or all (all requests without a cache_salt, too).
        allow_runtime_loading: Let admin keys load and unload adapters and bundles at run time.
        adapter_folder: Folder that adapters and bundles can be loaded from at run time.
        state_file: File that records what was loaded at run time, for the next start.
        adapter_sources: Places where an adapter is looked for that a request names and that is not
            loaded yet, in this order: folders, hf://ORGANISATION or hf:// alone, and URLs of
            fsspec such as s3://bucket/adapters; none by default.
        adapter_allow: Patterns of the names that requests may load from adapter_sources, e.g.
            vehicles-*; * for any.
        adapter_cache: Folder for adapters that were fetched from adapter_sources.
        adapter_cache_bytes: Most bytes of that folder; the least recently used adapters that are
            not loaded are deleted first.
        adapter_bytes: Most bytes of one adapter from adapter_sources.
        adapter_seconds: Time limit in seconds for fetching an adapter.
        adapter_retry_seconds: Time in seconds for which a name that could not be loaded is refused
            without asking adapter_sources again.
        max_found_adapters: Most adapters that are loaded from adapter_sources at a time; the least
            recently used one without a request is unloaded first.
        max_body_bytes: Largest request body, in bytes; routes without images have lower limits.
        max_json_bytes: Largest request body in JSON, in bytes: an image of 20 MiB in base64 fits.
            Parsing holds up all other requests; larger videos are sent as a form or fetched.
        max_held_bytes: Most bytes of the bodies of all requests in progress; requests beyond it
            get status 429.
        max_image_bytes: Largest image file, in bytes.
        max_image_pixels: Largest image or video frame, in pixels (width x height).
        max_video_pixels: Most pixels of the frames that are taken from a video together.
        max_image_side: Largest width or height of an image or video frame, in pixels.
        max_image_ratio: Largest ratio of an image's longer side to its shorter one; the base
            model may enlarge an image until its shorter side has a fixed length.
        max_decode_bytes: Most memory for decoding an image, or a video with its frames, in bytes;
            what is decoded at the same time takes no more together.
        max_request_pixels: Most pixels of all images and frames of one request.
        max_held_pixels: Most pixels of all requests in progress (4 bytes each); requests beyond
            it get status 429.
        max_images: Most images and videos in one request.
        max_video_bytes: Largest video file, in bytes.
        max_video_seconds: Longest video, in seconds.
        video_frames: Number of frames that are sampled from a video, evenly spaced.
        max_video_frames: Most frames of a video that is sent as single images.
        max_prompt_chars: Longest text of a request, in characters.
        max_n: Most completions of one request.
        strict_schemas: Treat every JSON schema as one with `strict`: objects take no keys that the
            schema does not name, unless it sets additionalProperties.
        media_hosts: Hosts that images and videos may be fetched from; none by default.
        media_private: Allow media_hosts to have private addresses, e.g. a store in an intranet.
        media_folder: Folder that file:// URLs may point to; none by default.
        media_seconds: Time limit in seconds for fetching an image or video, and for waiting until
            it can be decoded.
        decode_seconds: Time limit in seconds for decoding an image or video; those of one request
            may take three times as long together.
        rate: Rate limit in requests per minute for each API key, or for each client address if
            there are no keys; 0 for no limit.
        burst: Number of requests that may arrive at once within the rate limit.
        max_waiting: Number of requests that may wait for the engine; requests beyond it get status
            429.
        max_connections: Most connections at a time; connections beyond it get status 503.
        deadline: Default deadline of a request in seconds from its arrival; 0 for none.
        deadlines: Deadline in seconds by domain, e.g. person=0.5; overrides deadline.
        deadline_admission: Refuse requests on arrival that would miss their deadline at the
            recent speed.
        body_seconds: Time limit in seconds for a client to send its request.
        send_seconds: Time limit in seconds for a client to take a piece of the response.
        drain_seconds: Time in seconds that running requests have to finish after SIGTERM.
        temperature: Sampling temperature of requests that set none; 0 is greedy.
        answer_tokens: Most tokens to generate for requests that set no limit.
        log_level: debug, info, warning or error.
        log_format: text, or json (one object per line).
        otlp_endpoint: OpenTelemetry collector (OTLP over HTTP) that receives a span per request.
        golden: Replay the golden examples of every bundle before it is served.
        console: Serve the web console at /.
        sample_folder: Folder for a sample of requests, which `valora predict` compares with a small
            model: PNG files that hold the domain's answer; none by default. Requests with
            `store: false` are left out.
        sample_shares: Share of the pictures that are kept by domain, e.g. person=0.01; those that
            come while four wait to be written are passed over.
        sample_bytes: Most bytes of that folder; once it is full, nothing more is kept.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    unix_socket: str | None = None
    root_path: str = ""
    trusted_proxies: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    keys_file: str | None = None
    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    protect_metrics: bool = False
    cache_sharing: Literal["key", "salt", "all"] = "key"
    allow_runtime_loading: bool = False
    adapter_folder: str | None = None
    state_file: str = ".valora/serve/served.json"
    adapter_sources: tuple[str, ...] = ()
    adapter_allow: tuple[str, ...] = ()
    adapter_cache: str = ".valora/serve/adapters"
    adapter_cache_bytes: Count = 16 * 2**30
    adapter_bytes: Count = 2 * 2**30
    adapter_seconds: Seconds = 120.0
    adapter_retry_seconds: NotNegative = 30.0
    max_found_adapters: Count = 64
    max_body_bytes: Count = 64 * 2**20
    max_json_bytes: Count = 32 * 2**20
    max_held_bytes: Count = 512 * 2**20
    max_image_bytes: Count = 20 * 2**20
    max_image_pixels: Count = 16_777_216
    max_video_pixels: Count = 50_000_000
    max_image_side: Count = 16_384
    max_image_ratio: Annotated[float, Field(ge=1)] = 50.0
    max_decode_bytes: Count = 256 * 2**20
    max_request_pixels: Count = 100_000_000
    max_held_pixels: Count = 400_000_000
    max_images: Count = 64
    max_video_bytes: Count = 48 * 2**20
    max_video_seconds: Seconds = 600.0
    video_frames: Count = 8
    max_video_frames: Count = 64
    max_prompt_chars: Count = 400_000
    max_n: Count = 16
    strict_schemas: bool = False
    media_hosts: tuple[str, ...] = ()
    media_private: bool = False
    media_folder: str | None = None
    media_seconds: Seconds = 10.0
    decode_seconds: Seconds = 2.5
    rate: NotNegative = 0.0
    burst: Count = 60
    max_waiting: Count = 1024
    max_connections: Count = 4096
    deadline: NotNegative = 0.0
    deadlines: dict[str, Seconds] = field(default_factory=dict)
    deadline_admission: bool = True
    body_seconds: Seconds = 60.0
    send_seconds: Seconds = 30.0
    drain_seconds: NotNegative = 30.0
    temperature: NotNegative = 0.0
    answer_tokens: Count = 256
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str | None = None
    golden: bool = True
    console: bool = True
    sample_folder: str | None = None
    sample_shares: dict[str, Annotated[float, Field(ge=0, le=1)]] = field(default_factory=dict)
    sample_bytes: Count = 2**28

    def __post_init__(self) -> None:
        """Check what types do not say."""
        for proxy in set(self.trusted_proxies) - {"unix"}:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(
                    f"trusted_proxies: {error}: name IP addresses or networks"
                ) from error
        for wrong, said in (
            (re.fullmatch(r"(/[\w.~-]+)*", self.root_path, re.ASCII) is None,
             f"root_path is {self.root_path}: write a path, e.g. /valora"),
            ((self.tls_cert is None) != (self.tls_key is None),
             "tls_cert and tls_key go together: name both or none"),
            (self.api_key is not None and len(self.api_key) < 16,
             "api_key is short enough to guess: use at least 16 characters"),
            (self.allow_runtime_loading and not self.adapter_folder,
             "allow_runtime_loading lacks adapter_folder: name the folder below which adapters may "
             "be loaded from"),
            (self.allow_runtime_loading and not (self.api_key or self.keys_file),
             "allow_runtime_loading lacks an API key: make one with `valora-serve key` and name "
             "keys_file"),
            (bool(self.adapter_sources) != bool(self.adapter_allow),
             "adapter_sources and adapter_allow go together: name where adapters are looked for, "
             "and patterns of the names that requests may load (* for any)"),
            (self.adapter_bytes > self.adapter_cache_bytes,
             f"adapter_bytes is {self.adapter_bytes}, more than adapter_cache_bytes "
             f"({self.adapter_cache_bytes}): an adapter must fit into the cache"),
            (re.fullmatch(r"https?://[^/\s]+.*", self.otlp_endpoint or "http://-") is None,
             f"otlp_endpoint is {self.otlp_endpoint}: write a URL, e.g. http://collector:4318"),
            (bool(self.sample_folder) != bool(self.sample_shares),
             "sample_folder and sample_shares go together: name a folder, and the share of the "
             "pictures of each domain, e.g. person=0.01"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(said)


def existing_folder(setting: str, folder: str | Path) -> Path:
    """Return the folder of a setting without links; refused if there is none."""
    if not Path(folder).is_dir():
        raise SettingsError(f"{setting} {folder} is no folder: make it, or name another")
    return Path(folder).resolve()
