"""What a trial can do: one file a method."""
