"""One forward pass, written down operator by operator."""
