"""Peers by name: one file and one line each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.bench.valora_serve.peers.base import Peer

PEERS: Final = {
    "valora": "tests.bench.valora_serve.peers.valora:Valora",
    "vllm": "tests.bench.valora_serve.peers.vllm:Vllm",
    "sglang": "tests.bench.valora_serve.peers.sglang:Sglang",
}
"""Class of each peer. Its module imports the peer's package in `__init__` only."""


def find(name: str) -> type[Peer]:
    """Import the class of a peer; the package that it measures need not be installed."""
    module, _, member = PEERS[name].partition(":")
    found: type[Peer] = getattr(import_module(module), member)
    return found
