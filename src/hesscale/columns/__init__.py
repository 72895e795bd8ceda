"""Vectors carried beside the diagonal: seed them at a loss's own curvature, pull them by torch, square per example.

Exact eigenpairs (``rank=``), samples (GGN-MC) and all there are (``rank="full"``) are these same three steps:

- likelihoods.py   the curvature of a loss at its predictions, and the vectors it is made of (eigenpairs.py)
- batch_layout.py  which element of which tensor belongs to which example
- pulling.py       vector-Jacobian products that no hook sees
- squares.py       the gradient of every single example, at the node where a parameter is used
- targets.py       the squares of one parameter, used once or often
- dial.py          ``rank=``, beside a walk
- sampled.py       GGN-MC; hutchinson.py, which needs none of this, is the other sampled diagonal

Nothing in here propagates curvature, so ``hesscale.backward`` stands on it.
"""
