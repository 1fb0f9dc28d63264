"""Eigenvalues, densities and ascent, from products with Hessians."""
