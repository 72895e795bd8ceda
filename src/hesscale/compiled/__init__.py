"""``torch.compile(model, backend="hesscale")``: compiled regions that curvature passes through."""
