"""Equal networks: the same function with other parameters."""
