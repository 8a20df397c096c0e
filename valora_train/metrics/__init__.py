"""Task metrics with confidence intervals."""
