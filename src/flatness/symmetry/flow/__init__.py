"""How factors flow through a recorded forward pass, and which channels scale together."""
