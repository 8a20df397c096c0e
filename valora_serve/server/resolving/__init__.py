"""Adapters that requests name before they are loaded: found, downloaded, cached and loaded."""
