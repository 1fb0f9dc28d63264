"""`flatness.measure`, top to bottom: request, examination, plan, run, rows."""
