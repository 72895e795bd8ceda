"""A2C and PPO for many independent runs side by side, computed by the same calls of torch.

The parameters of several seeds with one step size are one tensor [seeds, ...], a block. Adam and AdaHesScale treat
every entry by itself, so each seed learns as it would alone; a method that looks at all entries at once (a trust
region) has blocks of one seed. A layer of all blocks is one product. Runs that are not finite any more stand still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hesscale

from .environments import Copies, Environment
from .losses import policy_gradient, ppo_clip, squared_error

HIDDEN = 32
WINDOWS = 10
"""The number of points of a learning curve."""

Make = Callable[[Any, float], torch.optim.Optimizer]


@dataclass(frozen=True)
class Algorithm:
    """How experience becomes updates."""

    copies: int  # of the environment, for each run
    horizon: int  # steps between updates
    epochs: int
    parts: int  # in which the experience is cut
    smoothing: float  # λ of generalized advantage estimation
    clips: bool  # PPO's loss, and normalized advantages


ALGORITHMS: Mapping[str, Algorithm] = {
    "A2C": Algorithm(copies=8, horizon=8, epochs=1, parts=1, smoothing=1.0, clips=False),
    "PPO": Algorithm(copies=8, horizon=128, epochs=4, parts=4, smoothing=0.95, clips=True),
}


@dataclass(frozen=True)
class Method:
    """An optimizer, the curvature it reads (None for none), and whether it treats every entry by itself."""

    make: Make
    curvature: str | None = None
    by_entry: bool = True


Weights = Sequence[tuple[Tensor, Tensor]]
"""Of linear layers, [runs, in, out] and [runs, 1, out]."""


def weights_of(seeds: Sequence[int], sizes: Sequence[int], gain: float) -> Weights:
    """Linear layers of these sizes, orthogonal at first; ``gain`` is that of the last one."""
    layers = []
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        scale = gain if index == len(sizes) - 2 else math.sqrt(2)
        weight = torch.stack([_orthogonal(inputs, outputs, scale, 10 * seed + index) for seed in seeds])
        layers.append((nn.Parameter(weight), nn.Parameter(torch.zeros(len(seeds), 1, outputs))))
    return layers


def _orthogonal(inputs: int, outputs: int, scale: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nn.init.orthogonal_(torch.empty(outputs, inputs), scale, generator=generator).T.contiguous()


def outputs_of(weights: Weights, x: Tensor) -> Tensor:
    """[runs, batch, outputs] from [runs, batch, inputs], with tanh between the layers."""
    for index, (weight, bias) in enumerate(weights):
        x = torch.baddbmm(bias, x.tanh() if index else x, weight)
    return x


class Block:
    """The actors and critics of some seeds with one step size, and their optimizers."""

    def __init__(self, environment: Environment, method: Method, lr: float, seeds: Sequence[int]) -> None:
        size = environment.policy.outputs(environment.actions)
        sizes = (environment.observations, HIDDEN, HIDDEN)
        self.nets = (weights_of(seeds, (*sizes, size), 0.01), weights_of(seeds, (*sizes, 1), 1.0))
        self._params = [[p for layer in net for p in layer] for net in self.nets]
        self._optimizers = [method.make(params, lr) for params in self._params]
        self.alive = torch.ones(len(seeds), dtype=torch.bool)

    def zero_grad(self) -> None:
        """Clears gradients and curvature."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Updates the seeds that are finite; the others stand still."""
        tensors = [t for p in chain(*self._params) for t in (p, p.grad, getattr(p, "curvature", None)) if t is not None]
        self.alive &= torch.stack([torch.isfinite(t.detach().flatten(1)).all(1) for t in tensors]).all(0)
        if not self.alive.all():
            for t in tensors:
                t.detach()[~self.alive] = 0.0
        for optimizer in self._optimizers:
            optimizer.step()


class Runs:
    """Runs of one algorithm with one method, for each of these step sizes and seeds."""

    def __init__(
        self,
        environment: Environment,
        algorithm: Algorithm,
        method: Method,
        *,
        rates: Sequence[float],
        seeds: Sequence[int],
    ) -> None:
        apart = [seeds] if method.by_entry else [[seed] for seed in seeds]
        self._blocks = [Block(environment, method, lr, some) for lr in rates for some in apart]
        self.settings = [(lr, seed) for lr in rates for seed in seeds]
        self._environment, self._algorithm, self._method = environment, algorithm, method
        self._shape = (len(self.settings), algorithm.copies)
        self._copies = Copies(environment, math.prod(self._shape), seeds[0])
        self._generator = torch.Generator().manual_seed(seeds[0])

    @property
    def alive(self) -> list[bool]:
        """Whether each run is finite."""
        return torch.cat([block.alive for block in self._blocks]).tolist()

    def _actors_and_critics(self) -> tuple[Weights, Weights]:
        nets = [[block.nets[k] for block in self._blocks] for k in (0, 1)]
        actors, critics = ([_joined(layer) for layer in zip(*same, strict=True)] for same in nets)
        return actors, critics

    def rounds(self, steps: int) -> Iterator[list[list[float]]]:
        """Plays and learns for ``steps`` steps of each run; yields each run's returns of episodes, round by round."""
        for _ in range(steps // (self._algorithm.copies * self._algorithm.horizon)):
            experience, returns = self._play()
            self._learn(experience)
            yield returns

    @torch.no_grad()
    def _play(self) -> tuple[dict[str, Tensor], list[list[float]]]:
        (actors, _), policy = self._actors_and_critics(), self._environment.policy
        kept: dict[str, list[Tensor]] = {}
        returns: list[list[float]] = [[] for _ in range(self._shape[0])]
        for _ in range(self._algorithm.horizon):
            seen = self._view(self._copies.observation)
            outputs = outputs_of(actors, seen)
            noise = torch.rand(outputs.shape, generator=self._generator).clamp_(1e-6, 1 - 1e-6)
            # a run that is no longer finite stands still, and must not stop the others
            actions = policy.sample(outputs.nan_to_num(), noise)
            reward, last, ended, over, total = self._copies.step(actions.flatten(0, 1).numpy())
            now = {"seen": seen, "actions": actions, "old": policy.log_probability(outputs, actions)}
            now |= {"last": self._view(last), "reward": self._view(reward.astype(np.float32))}
            now |= {"goes_on": self._view(1 - ended.astype(np.float32)), "over": self._view(over)}
            for name, value in now.items():
                kept.setdefault(name, []).append(value)
            for run, copy in np.argwhere(~np.isnan(total).reshape(self._shape)):
                returns[run].append(float(total.reshape(self._shape)[run, copy]))
        return {name: torch.stack(values, 1) for name, values in kept.items()}, returns

    def _view(self, array: Any) -> Tensor:
        return torch.from_numpy(array).unflatten(0, self._shape)

    @torch.no_grad()
    def _advantages(self, e: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Generalized advantages, and returns: A_t = δ_t + γλ A_{t+1} within an episode, δ = r + γ V(last) − V."""
        _, critics = self._actors_and_critics()
        values, nexts = (
            outputs_of(critics, e[name].flatten(1, 2)).view(e["reward"].shape) for name in ("seen", "last")
        )
        gamma, decay = self._environment.discount, self._environment.discount * self._algorithm.smoothing
        surprise = self._environment.scale * e["reward"] + gamma * nexts * e["goes_on"] - values
        advantages, running = torch.empty_like(surprise), torch.zeros_like(surprise[:, 0])
        for t in reversed(range(surprise.shape[1])):
            running = surprise[:, t] + decay * running * ~e["over"][:, t]
            advantages[:, t] = running
        return advantages, advantages + values

    def _learn(self, experience: Mapping[str, Tensor]) -> None:
        advantages, returns = self._advantages(experience)
        data = {"advantages": advantages, "returns": returns, **experience}
        flat = {name: value.flatten(1, 2) for name, value in data.items()}
        size = flat["old"].shape[1]
        for _ in range(self._algorithm.epochs):
            for part in torch.randperm(size, generator=self._generator).chunk(self._algorithm.parts):
                self._update({name: value[:, part] for name, value in flat.items()})

    def _update(self, e: Mapping[str, Tensor]) -> None:
        actors, critics = self._actors_and_critics()
        outputs, values = outputs_of(actors, e["seen"]), outputs_of(critics, e["seen"]).squeeze(-1)
        chosen, advantages = self._environment.policy.log_probability(outputs, e["actions"]), e["advantages"]
        if self._algorithm.clips:
            spread = advantages.std(-1, keepdim=True) + 1e-8
            actor = ppo_clip(chosen, e["old"], (advantages - advantages.mean(-1, keepdim=True)) / spread)
        else:
            actor = policy_gradient(chosen, advantages)
        loss = actor + squared_error(values, e["returns"])
        for block in self._blocks:
            block.zero_grad()
        if self._method.curvature is None:
            loss.backward()
        else:
            # PPO's loss has two non-linear stages: where it begins must be said
            output = (outputs, values) if self._method.curvature == "hesscale_gn" else None
            hesscale.backward(loss, method=self._method.curvature, output=output)
        for block in self._blocks:
            block.step()


def _joined(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([weight for weight, _ in layers]), torch.cat([bias for _, bias in layers])


def curves(runs: Runs, steps: int) -> list[list[float | None]]:
    """For each run the mean return of the episodes that ended in each tenth of its steps; None where none did."""
    rounds = [*runs.rounds(steps)]
    bounds = [round(len(rounds) * k / WINDOWS) for k in range(WINDOWS + 1)]
    windows = [rounds[low:high] for low, high in pairwise(bounds)]
    return [[_mean([r for one in window for r in one[run]]) for window in windows] for run in range(len(runs.settings))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
