"""Families of base models: one file and one line in `registry` for each."""
