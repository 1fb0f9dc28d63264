"""A model, its data and a loss, made safe to differentiate."""
