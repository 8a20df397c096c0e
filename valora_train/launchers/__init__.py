"""Hydra's launchers: where the jobs of a sweep run, on this machine or on several."""
