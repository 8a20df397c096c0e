"""Task types: one file each, registered in `registry`."""
