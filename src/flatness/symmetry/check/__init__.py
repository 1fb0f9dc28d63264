"""Which measures notice that a network was rewritten into an equal one."""
