"""The stages of the pipeline in order: data, teach and distill, fuse, export, gate."""
