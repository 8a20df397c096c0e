"""The kinds of teachers, one file each; they import their libraries when they are used."""
