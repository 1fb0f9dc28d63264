"""The words that arguments of `flatness.measure` take; read without torch, by the command line too."""

METHODS = ("auto", "exact", "sampled")
CURVATURES = ("hessian", "gauss_newton", "finite_differences")
