"""Command ``valora doctor`` (``valora-serve doctor``): what this machine lacks, and the remedy."""
