"""The HTTP server; knows no engine and no model."""
