"""One record per GPU, with the tiling table that was measured on it beside it.

- `base`: what a record says.
- `registry`: the records there are, and which of them describes a device.
- `detect`: the record of a torch device; one read from the driver where none is registered.
- `nvidia_h200`: a record, with its table `nvidia_h200.json`.
- `nvidia_h100`: the same chip, whose tilings are the H200's until its own are measured.
"""
