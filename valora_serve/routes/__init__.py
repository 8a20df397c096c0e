"""The HTTP endpoints, a file for each family."""
