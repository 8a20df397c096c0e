"""Fusion strategies: which open adapters to try for a domain. Nothing here imports torch."""
