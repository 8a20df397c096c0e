"""Checks of a data set, and contact sheets that show what was found."""
