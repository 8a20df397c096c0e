"""Trials: trainings outside of a fusion, for oracle tables and comparisons."""
