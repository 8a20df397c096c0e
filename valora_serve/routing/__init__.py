"""Decides which replica answers a request; imports no torch."""
