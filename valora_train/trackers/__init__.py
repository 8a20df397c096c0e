"""Trackers beside MLflow (`tracking.also`): each is told what MLflow is told."""
