"""Sources of samples: data sets of users, and built-in scenes that are drawn."""
