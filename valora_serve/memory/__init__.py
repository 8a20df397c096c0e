"""One page pool for keys, values and adapter weights."""
