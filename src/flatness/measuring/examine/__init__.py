"""What a few samples tell about a network before any data are streamed."""
