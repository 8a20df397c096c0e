"""The built-in domains: scenes drawn on photographs."""
