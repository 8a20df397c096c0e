"""What people see of a run: the terminal, MLflow, pictures, the card of a bundle."""
