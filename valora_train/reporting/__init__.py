"""What users see of a run: MLflow, pictures, progress, tables."""
