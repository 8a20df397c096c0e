"""What training and serving agree on."""
