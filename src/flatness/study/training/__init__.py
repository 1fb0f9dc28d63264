"""Networks of one shape trained together."""
