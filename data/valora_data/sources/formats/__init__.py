"""Readers of data-set formats, one file a format."""
