"""``valora predict``: answers of a bundle's domains for a folder of files, without a server."""
