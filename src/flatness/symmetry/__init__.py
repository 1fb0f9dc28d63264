"""What may be changed in a network without changing what it computes, and which measures notice."""
