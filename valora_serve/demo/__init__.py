"""``valora demo``: serves the bundle that ships with the package."""
