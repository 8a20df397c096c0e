"""Where samples come from: files of people, and scenes that we draw."""
