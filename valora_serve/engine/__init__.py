"""Requests in, batches through the model, answers out."""
