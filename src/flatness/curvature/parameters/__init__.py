"""A network's parameters as one vector: risk, gradients and Hessian products."""
