"""Predicts what a run will take: time, memory and disk, stage by stage."""
