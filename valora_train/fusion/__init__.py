"""Knowledge fusion: decisions, training, continuing an earlier fusion."""
