"""From flatness to generalisation: feature robustness, representativeness and the bound of petzka2021."""
