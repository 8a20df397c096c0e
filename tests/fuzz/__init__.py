"""Fuzzing and soak commands: hostile input by the thousand (`make fuzz`, `make soak`)."""
