"""Bundles and adapters: found, verified by golden examples, loaded and unloaded."""
