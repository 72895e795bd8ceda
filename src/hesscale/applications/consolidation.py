"""Learning one task after another without forgetting: elastic weight consolidation (EWC) with any diagonal.

After a task the loss around its weights θ* is taken for a parabola, and departures from it cost

    ½ λ Σ_i h_i (θ_i − θ*_i)²

Online (Schwarz et al. 2018), the default, there is one parabola: after each task h ← decay · h + h_new and θ* is where
that task ended. With decay=1 this is the recursion of Laplace's approximation (Huszár 2018): exact, if losses are
parabolas with diagonal Hessians. With ``separate=True`` (Kirkpatrick et al. 2017) every task keeps its own parabola
around its own θ*.

Negative h counts as 0: a penalty that falls with distance would drive weights away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn

from ..estimators.problem import LossFunction
from ..graph import wide
from .over_batches import Batches, How, diagonal_over

_PRECISION, _ANCHOR = "precision", "anchor"


@final
class EWC(nn.Module):
    """The penalty as a module: ``loss = loss_fn(model(x), y) + ewc()``. Zero until the first ``consolidate``.

    Its ``state_dict`` holds all parabolas, and goes into a fresh ``EWC`` of the same model that was made with the same
    options: ``strength``, ``decay`` and ``separate`` are no part of it, nor are the model's own parameters. A deep copy
    follows a copy of the model: copy both at once, as ``copy.deepcopy((model, ewc))``.

    >>> model, batches = nn.Linear(2, 1), [(torch.randn(8, 2), torch.randn(8, 1))]
    >>> ewc = hesscale.applications.consolidation.EWC(model, strength=10.0)
    >>> ewc.consolidate(F.mse_loss, batches)  # the first task is learned
    >>> ewc().item()  # to be added to the loss of the second
    0.0
    """

    def __init__(self, model: nn.Module, *, strength: float = 1.0, decay: float = 1.0, separate: bool = False) -> None:
        super().__init__()
        if not strength >= 0:
            raise ValueError(f"strength must be a number from 0, not {strength}")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be between 0 and 1, not {decay}")
        if separate and decay != 1:
            raise ValueError("decay is for the one parabola of online EWC: leave it out, or separate=True")
        self.strength, self.decay, self.separate = strength, decay, separate
        self.tasks = nn.ModuleList()
        self._model = (model,)  # in a tuple, so that its parameters are not the penalty's

    def consolidate(
        self,
        loss_fn: LossFunction | None = None,
        batches: Batches | None = None,
        *,
        weight: float = 1.0,
        **how: Unpack[How],
    ) -> None:
        """Remembers the weights as they are now, as precisely as the curvature of this task's mean loss says.

        ``weight`` multiplies that curvature: the number of examples, say, where the loss is a sum over examples.
        """
        if not weight >= 0:
            raise ValueError(f"weight must be a number from 0, not {weight}")
        model = self._model[0]
        found = diagonal_over(model, loss_fn, batches, **how)
        precision = {name: weight * h.clamp(min=0) for name, h in found.items()}
        if self.tasks and not self.separate:
            before = _Parabola.of(self.tasks[0]).values(_PRECISION)
            _refuse_other(before, precision)
            precision = {name: h + self.decay * before[name].to(h) for name, h in precision.items()}
        anchor = {name: model.get_parameter(name).detach().clone() for name in precision}
        fresh = _Parabola(precision, anchor)
        self.tasks = nn.ModuleList([*self.tasks, fresh] if self.separate else [fresh])

    def forward(self) -> Tensor:
        """½ λ Σ h (θ − θ*)², over all parabolas."""
        params = dict(self._model[0].named_parameters())
        if not params:
            raise ValueError("the model has no parameters to consolidate")
        first = next(iter(params.values()))
        total = first.new_zeros((), dtype=wide(first.dtype))
        for task in self.tasks:
            total = total + _Parabola.of(task).at(params)
        return self.strength / 2 * total

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *more: Any) -> None:
        """Makes room for the parabolas of the state, however many there are; with none, torch reports ours missing."""
        found = _parabolas(state_dict, f"{prefix}tasks.")
        if len(found) > 1 and not self.separate:
            raise ValueError(f"this state has {len(found)} parabolas: it belongs to an EWC with separate=True")
        for task in found:
            self._refuse_other_model(task)
        if found:
            self.tasks = nn.ModuleList(found)
        super()._load_from_state_dict(state_dict, prefix, *more)

    def _refuse_other_model(self, task: _Parabola) -> None:
        shapes = {name: p.shape for name, p in self._model[0].named_parameters()}
        precision, anchor = task.values(_PRECISION), task.values(_ANCHOR)
        for name, value in (*precision.items(), *anchor.items()):
            if shapes.get(name) != value.shape:
                raise ValueError(f"this state has {name} of shape {tuple(value.shape)}: it belongs to another model")
        if precision.keys() != anchor.keys():
            lacking = sorted(precision.keys() ^ anchor.keys())
            raise ValueError(
                f"this state is incomplete, without precision or anchor of {', '.join(lacking[:3])}: load the whole "
                "state_dict of an EWC"
            )


@final
class _Parabola(nn.Module):
    """h and θ* by parameter name, as buffers."""

    def __init__(self, precision: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> None:
        super().__init__()
        for kind, values in ((_PRECISION, precision), (_ANCHOR, anchor)):
            for name, value in values.items():
                self.register_buffer(f"{kind}/{_escaped(name)}", value)

    @classmethod
    def of(cls, module: nn.Module) -> _Parabola:
        assert isinstance(module, cls)
        return module

    @classmethod
    def like(cls, state: Mapping[str, Tensor]) -> _Parabola:
        """Of the names and shapes in a state."""
        room = cls({}, {})
        for name, value in state.items():
            room.register_buffer(name, torch.empty_like(value))
        return room

    def values(self, kind: str) -> dict[str, Tensor]:
        """By parameter name."""
        start = f"{kind}/"
        return {_plain(name.removeprefix(start)): b for name, b in self.named_buffers() if name.startswith(start)}

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        """Σ h (θ − θ*)²."""
        anchor = self.values(_ANCHOR)
        terms = []
        for name, h in self.values(_PRECISION).items():
            p = params[name].to(wide(params[name].dtype))  # squares of small differences vanish in half precision
            terms.append((h.to(p) * (p - anchor[name].to(p)).square()).sum())
        return torch.stack(terms).sum()


def _parabolas(state: Mapping[str, Any], start: str) -> list[_Parabola]:
    """Room for those of a state, whose keys are start + number + "." + the name of a buffer."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        number, _, own = key.removeprefix(start).partition(".")
        if key.startswith(start) and own.startswith((f"{_PRECISION}/", f"{_ANCHOR}/")):
            found.setdefault(number, {})[own] = value
    numbers = [str(number) for number in range(len(found))]
    if found.keys() != set(numbers):
        raise ValueError(f"this state has parabolas {', '.join(found)}, not all from 0: load the whole one of an EWC")
    return [_Parabola.like(found[number]) for number in numbers]


# names of buffers must not have dots, which become slashes; what is a slash already is escaped as in a JSON pointer


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1").replace(".", "/")


def _plain(name: str) -> str:
    return name.replace("/", ".").replace("~1", "/").replace("~0", "~")


def _refuse_other(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    if before.keys() != now.keys():
        differing = sorted(before.keys() ^ now.keys())
        raise ValueError(
            f"earlier tasks were consolidated with other parameters (the difference: {', '.join(differing[:3])}): pass "
            "the same params= each time"
        )
