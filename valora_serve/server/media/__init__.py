"""Images and videos of requests: fetched, checked and decoded."""
