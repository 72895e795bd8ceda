"""The backend itself: what ``torch.compile(model, backend="hesscale")`` calls with each graph that Dynamo captures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .capture import Capture
from .pieces import Backend
from .region import Region
from .torch_compiler import compiled_by, running_fake_mode, settings_of_mode


def hesscale(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Code for a graph that computes its outputs, their gradients and, when asked for, curvature."""
    settings = dict(options or {})
    backend = Backend(settings.pop("backend", "inductor"), settings_of_mode(mode) | settings)
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        capture = Capture(module, inputs, running_fake_mode())
        if capture.tops:
            return Region(capture, backend)
    return compiled_by(backend.name, module, inputs, backend.options)
