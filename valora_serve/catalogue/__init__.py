"""What a request can name: adapters, heads and domains."""
