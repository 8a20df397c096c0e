"""Engines on several GPUs and machines, as replicas of Ray Serve behind one HTTP server."""
