"""Attention over paged keys and values: one interface, one file per library behind it."""
