"""Domains, samples, data sources and bundles: what both sides agree on. Imports nothing of ours."""
