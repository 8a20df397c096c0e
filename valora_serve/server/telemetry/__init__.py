"""Logs, Prometheus metrics and OpenTelemetry spans."""
