"""`flatness.measure`, top to bottom: request, examination, plan, run, rows.

Here are the words that its arguments take; read without torch, by the command line too.
"""

METHODS = ("auto", "exact", "sampled")
CURVATURES = ("hessian", "gauss_newton", "finite_differences")
