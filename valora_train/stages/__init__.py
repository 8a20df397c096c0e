"""The stages of the pipeline, in their order: data, teach and distill, fuse, export, gate."""
