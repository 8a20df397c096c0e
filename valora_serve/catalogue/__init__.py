"""What requests can name: adapters, and the domains of bundles."""
