"""What can go wrong before a pass starts, each in words that say what to do."""

from collections.abc import Mapping

__all__ = ["MissingRuleError"]

OPAQUE = {
    "CompiledFunctionBackward": (
        "A torch.compile'd region is one opaque node, so no curvature can pass through it: call the uncompiled "
        "model on steps that need curvature (compiled_model._orig_mod is it) and the compiled one elsewhere."
    ),
    "CheckpointFunctionBackward": (
        "Reentrant checkpointing hides its graph: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
    ),
    "DifferentiableGraphBackward": "A torch.jit.script'ed part is opaque: call the unscripted model.",
    "torch::autograd::NotImplemented": "PyTorch itself has no derivative for one of these operations.",
}
_HOW_TO_REGISTER = (
    'Add a rule with hesscale.register(rule, "NodeName"), e.g. hesscale.register(hesscale.Selection(), "NodeName") '
    "where every Jacobian entry is 0 or 1 (docs/adding-a-rule.md shows all families), or pass missing='exact' or "
    "missing='sample' to have autograd work it out."
)


class MissingRuleError(NotImplementedError):
    """The graph holds operations the rule table does not know; ``counts`` maps each node name to its number."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = dict(sorted(counts.items()))
        listed = ", ".join(f"{name} (x{count})" for name, count in self.counts.items())
        advice = [OPAQUE[name] for name in self.counts if name in OPAQUE]
        if len(advice) < len(self.counts):
            advice.append(_HOW_TO_REGISTER)
        super().__init__(f"No curvature rule for: {listed}. Nothing was changed. " + " ".join(advice))
