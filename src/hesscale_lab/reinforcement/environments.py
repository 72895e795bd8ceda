"""CartPole, Acrobot and Pendulum for many copies at once, with the same steps as gymnasium's.

A state is an array [copies, numbers]. ``Copies`` begins a new episode as soon as one has ended, and tells what the last
observation of the old one was: an episode that ran into its time limit has not failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .losses import GAUSSIAN, SOFTMAX, Policy

Array = np.ndarray[Any, Any]
Step = tuple[Array, Array, Array]
"""The next states, rewards, and whether the episode has come to its end."""


@dataclass(frozen=True)
class Environment:
    """One row of the table below."""

    step: Callable[[Array, Array], Step]  # from states and actions
    observe: Callable[[Array], Array]
    spread: tuple[float, ...]  # episodes begin uniformly within ± these
    observations: int
    actions: int  # choices, or dimensions
    policy: Policy
    limit: int  # steps of an episode
    random: float  # the return of actions at random
    solved: float  # a return that counts as solved
    discount: float = 0.99
    scale: float = 1.0  # of rewards in learning


def _cart_pole(state: Array, action: Array) -> Step:
    x, v, angle, spin = state.T
    cos, sin = np.cos(angle), np.sin(angle)
    push = (np.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    pull = push - 0.05 * turn * cos / 1.1
    after = np.stack((x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn), 1)
    fell = (np.abs(after[:, 0]) > 2.4) | (np.abs(after[:, 2]) > 12 * 2 * math.pi / 360)
    return after, np.ones(len(state)), fell


def _acrobot(state: Array, action: Array) -> Step:
    """Runge-Kutta of fourth order over 0.2 seconds, with the torque held."""
    torque = action - 1.0
    k1 = _acrobot_slope(state.T, torque)
    k2 = _acrobot_slope(state.T + 0.1 * k1, torque)
    k3 = _acrobot_slope(state.T + 0.1 * k2, torque)
    k4 = _acrobot_slope(state.T + 0.2 * k3, torque)
    after = state.T + 0.2 / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
    after[:2] = (after[:2] + math.pi) % (2 * math.pi) - math.pi
    limits = np.array([[4 * math.pi], [9 * math.pi]])
    after[2:] = np.clip(after[2:], -limits, limits)
    up = -np.cos(after[0]) - np.cos(after[1] + after[0]) > 1.0
    return after.T, np.where(up, 0.0, -1.0), up


def _acrobot_slope(state: Array, torque: Array) -> Array:
    """Sutton and Barto's equations: links of mass, length and inertia 1, centers at ½."""
    first, second, v1, v2 = state
    cos, sin = np.cos(second), np.sin(second)
    d1, d2 = 3.5 + cos, 1.25 + 0.5 * cos
    phi2 = 4.9 * np.sin(first + second)
    phi1 = -0.5 * v2**2 * sin - v2 * v1 * sin + 14.7 * np.sin(first) + phi2
    a2 = (torque + d2 / d1 * phi1 - 0.5 * v1**2 * sin - phi2) / (1.25 - d2**2 / d1)
    return np.stack((v1, v2, -(d2 * a2 + phi1) / d1, a2))


def _acrobot_observation(state: Array) -> Array:
    first, second, v1, v2 = state.T
    return np.stack((np.cos(first), np.sin(first), np.cos(second), np.sin(second), v1, v2), 1)


def _pendulum(state: Array, action: Array) -> Step:
    angle, spin = state.T
    torque = np.clip(action[:, 0], -2.0, 2.0)
    upright = (angle + math.pi) % (2 * math.pi) - math.pi
    cost = upright**2 + 0.1 * spin**2 + 0.001 * torque**2
    after = np.clip(spin + (15.0 * np.sin(angle) + 3.0 * torque) * 0.05, -8.0, 8.0)
    return np.stack((angle + after * 0.05, after), 1), -cost, np.zeros(len(state), dtype=bool)


def _pendulum_observation(state: Array) -> Array:
    return np.stack((np.cos(state[:, 0]), np.sin(state[:, 0]), state[:, 1]), 1)


ENVIRONMENTS: Mapping[str, Environment] = {
    "CartPole": Environment(_cart_pole, lambda state: state, (0.05,) * 4, 4, 2, SOFTMAX, 500, 22.0, 475.0),
    "Acrobot": Environment(_acrobot, _acrobot_observation, (0.1,) * 4, 6, 3, SOFTMAX, 500, -499.0, -100.0),
    "Pendulum": Environment(
        _pendulum, _pendulum_observation, (math.pi, 1.0), 3, 1, GAUSSIAN, 200, -1230.0, -200.0, 0.95, 0.1
    ),
}


class Copies:
    """``count`` copies of an environment; when an episode ends, the next one begins."""

    def __init__(self, environment: Environment, count: int, seed: int) -> None:
        self._environment = environment
        self._generator = np.random.default_rng(seed)
        self._spread = np.array(environment.spread)
        self._state = self._fresh(count)
        self._age = np.zeros(count, dtype=int)
        self._return = np.zeros(count)

    def _fresh(self, count: int) -> Array:
        # for all copies, needed or not: what a copy draws does not depend on the others' fates
        return self._generator.uniform(-1.0, 1.0, (count, len(self._spread))) * self._spread

    @property
    def observation(self) -> Array:
        """The current observation of each copy."""
        return self._environment.observe(self._state).astype(np.float32)

    def step(self, action: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Rewards, last observations, whether the problem ended, whether the episode ended, and then its return."""
        after, reward, ended = self._environment.step(self._state, action)
        last = self._environment.observe(after).astype(np.float32)
        self._age += 1
        self._return += reward
        over = ended | (self._age >= self._environment.limit)
        returns = np.where(over, self._return, np.nan)
        fresh = self._fresh(len(after))
        self._state = np.where(over[:, None], fresh, after)
        self._age[over], self._return[over] = 0, 0.0
        return reward, last, ended, over, returns
