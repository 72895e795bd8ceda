"""What can go wrong before a pass starts, each with advice."""

from collections.abc import Container, Mapping

__all__ = ["MissingRuleError"]

SITE = "https://hesscale.github.io/hesscale"
"""Where the pages are that messages point to, as in {SITE}/method.html: a wheel brings no documents."""

COMPLEX = " (complex)"
"""What the name of a node that reads or makes a complex tensor ends with: it has rules of its own, or none."""

_LINEAR_CROSS_ENTROPY = (
    "linear_cross_entropy in chunks keeps its gradients and nothing else: pass options=None, or call F.cross_entropy "
    "on F.linear, on steps that need curvature."
)
OPAQUE = {
    "CompiledFunctionBackward": (
        "No curvature can pass through what another backend of torch.compile has compiled: pass backend='hesscale' to "
        "torch.compile, or run the steps that need curvature within `with torch.compiler.set_stance('force_eager'):`."
    ),
    "ApplyTemplateBackward": (
        "torch.compile takes autograd.Functions apart, and second derivatives with them: call "
        "torch.compiler.allow_in_graph(YourFunction) before it compiles, which keeps the Function and its rule whole."
    ),
    "CheckpointFunctionBackward": (
        "Reentrant checkpointing hides its graph: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
    ),
    "torch::jit::(anonymous namespace)::DifferentiableGraphBackward": (
        "A torch.jit.script'ed part is opaque once it was optimized: call the unscripted model."
    ),
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_defaultBackward": _LINEAR_CROSS_ENTROPY,
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_no_reduction_defaultBackward": (
        _LINEAR_CROSS_ENTROPY
    ),
    "torch::autograd::NotImplemented": "PyTorch itself has no derivative for one of these operations.",
}
_COMPLEX_ADVICE = (
    "Of complex tensors only products, sums, views and their two parts have rules; a complex parameter can be kept as "
    "a real one with a last dimension of two (torch.view_as_complex)."
)
_HIDING = (
    "A torch.autograd.Function whose backward runs a backward pass of its own hides what that reaches: have it take "
    "all tensors as arguments and return their gradients (torch.autograd.grad), or use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)
_HOW_TO_REGISTER = (
    'Add a rule with hesscale.register(rule, "NodeName"), e.g. hesscale.register(hesscale.Selection(), "NodeName") '
    f"where every Jacobian entry is 0 or 1 ({SITE}/adding-a-rule.html shows all families). Or have autograd work it "
    "out: missing='exact' for element-wise operations, autograd.Functions among them, and for small ones of any kind, "
    "missing='sample' for all."
)


class MissingRuleError(NotImplementedError):
    """The graph holds operations the rule table does not know; ``counts`` maps each node name to its number.

    >>> x = torch.randn(3, 3, requires_grad=True)
    >>> try:
    ...     hesscale.backward(torch.fft.rfft(x).abs().sum())
    ... except hesscale.MissingRuleError as error:
    ...     print(*error.counts)
    AbsBackward0 (complex) FftR2CBackward0 (complex)
    """

    def __init__(self, counts: Mapping[str, int], *, hiding: Container[str] = ()) -> None:
        self.counts = dict(sorted(counts.items()))
        listed = ", ".join(f"{name} (x{count})" for name, count in self.counts.items())
        unknown = [name for name in self.counts if name not in OPAQUE and name not in hiding]
        advice = list(dict.fromkeys(OPAQUE[name] for name in self.counts if name in OPAQUE))
        if any(name in hiding and name not in OPAQUE for name in self.counts):
            advice.append(_HIDING)
        if any(name.endswith(COMPLEX) for name in unknown):
            advice.append(_COMPLEX_ADVICE)
        if any(not name.endswith(COMPLEX) for name in unknown):
            advice.append(_HOW_TO_REGISTER)
        super().__init__(f"No curvature rule for: {listed}. Nothing was changed. " + " ".join(advice))
