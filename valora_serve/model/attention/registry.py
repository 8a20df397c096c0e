"""Attention backends by name, and the choice of the best one for a device."""

import logging

from valora_data.registry import Registry
from valora_data.wording import first_line
from valora_serve.errors import SettingsError
from valora_serve.model.attention.base import AttentionBackend, KVCache

log = logging.getLogger(__name__)

AUTO = "auto"  # stands for the first backend that suits the cache's device

BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "valora.attention_backends",
    "attention backend",
    {
        "torch": "valora_serve.model.attention.torch_backend:TorchBackend",
        "flashinfer": "valora_serve.model.attention.flashinfer_backend:FlashInferBackend",
        "triton": "valora_serve.model.attention.triton_backend:TritonBackend",
    },
    SettingsError,
)


def make_backend(name: str, cache: KVCache) -> AttentionBackend:
    """Create an attention backend of a name in `BACKENDS`, or `AUTO`; or `SettingsError`."""
    if name == AUTO:
        return _best_backend(cache)
    try:
        backend = _make(name, cache)
    except ImportError as error:
        raise SettingsError(
            f"attention backend {name!r} is not installed ({error}): install its library or choose "
            "another backend"
        ) from error
    except RuntimeError as error:
        raise SettingsError(
            f"attention backend {name!r} cannot be used ({first_line(error)}): "
            "`valora-serve --check` looks at its library, or choose another backend"
        ) from error
    backend.stand_in = None
    return backend


def _make(name: str, cache: KVCache) -> AttentionBackend:
    if BACKENDS[name].gpu_only and cache.device.type != "cuda":
        raise SettingsError(f"attention backend {name!r} needs a CUDA GPU: choose 'torch' on a CPU")
    return BACKENDS[name](cache)


def _best_backend(cache: KVCache) -> AttentionBackend:
    """Ask the backends in the order of their `auto_rank`; the first that works is taken."""
    ranked = [(kind.auto_rank, name) for name, kind in BACKENDS.items()]
    refused = []
    for _, name in sorted((rank, name) for rank, name in ranked if rank is not None):
        reason = BACKENDS[name].unsuitable(cache)
        if reason is None:
            try:
                backend = _make(name, cache)
            except Exception as error:  # noqa: BLE001 - the next one is tried
                reason = first_line(error)
            else:
                log.info("attention backend: %s", name)
                return backend
        log.info("attention backend %s was not chosen: %s", name, reason)
        refused.append(f"{name}: {reason}")
    raise SettingsError(f"no attention backend works on {cache.device} ({'; '.join(refused)})")
