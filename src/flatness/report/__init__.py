"""Results: values with their errors, tables of them, comparisons, and files they are saved to."""
