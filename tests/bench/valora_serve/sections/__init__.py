"""Sections of `bench_serve`, one module each."""
