"""What a study found: tables, correlations and a summary."""
