"""File formats that predictions are written in, one module for each."""
