"""Decides what each step computes; imports no torch."""
