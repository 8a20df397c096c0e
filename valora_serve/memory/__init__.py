"""Unified memory: KV cache and adapters in one pool of pages."""
