"""Request traces, the simulator and the benchmark client."""
