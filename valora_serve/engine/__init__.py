"""The engine: takes requests in, computes them in batches, hands outputs out."""
