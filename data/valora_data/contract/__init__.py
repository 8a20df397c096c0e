"""The contract between training and serving: base models, heads, boxes and bundles."""
