"""Documents that are learnt once and asked about: drawn ones, and those of users."""
