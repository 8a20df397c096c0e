"""LMM architectures: one file for each family, see `base.Architecture`."""
