"""Environments for many copies at once: step for step those of gymnasium, where it is installed."""

from typing import Any

import numpy as np
import pytest

from hesscale_lab.reinforcement.environments import ENVIRONMENTS, Copies, Environment


def random_actions(environment: Environment, count: int, generator: np.random.Generator) -> Any:
    if environment.spread[0] > 3:  # a torque
        return generator.uniform(-3, 3, (count, environment.actions)).astype(np.float32)
    return generator.integers(environment.actions, size=count)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_they_are_gymnasiums(name: str) -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="pip install 'hesscale[rl]'")
    environment, generator = ENVIRONMENTS[name], np.random.default_rng(0)
    theirs = gymnasium.make(f"{name}-v1").unwrapped
    ended = 0
    for episode in range(5):
        theirs.reset(seed=episode)
        state = np.array(theirs.state, dtype=np.float64)[None]
        assert (np.abs(state) <= environment.spread).all()
        for _ in range(120):
            action = random_actions(environment, 1, generator)
            wanted = theirs.step(action[0])
            state, reward, over = environment.step(state, action)
            np.testing.assert_allclose(environment.observe(state)[0], wanted[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(state[0], theirs.state, rtol=1e-9, atol=1e-9)
            assert reward[0] == pytest.approx(wanted[1], rel=1e-6)
            assert over[0] == wanted[2]
            if over[0]:
                ended += 1
                break
    assert ended == (5 if name == "CartPole" else 0)


def test_acrobot_ends_where_gymnasiums_does() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="pip install 'hesscale[rl]'")
    theirs = gymnasium.make("Acrobot-v1").unwrapped
    theirs.reset(seed=0)
    theirs.state = np.array([2.9, 0.1, 1.0, 0.5])
    _, reward, over, *_ = theirs.step(2)
    _, own_reward, own_over = ENVIRONMENTS["Acrobot"].step(np.array([[2.9, 0.1, 1.0, 0.5]]), np.array([2]))
    assert (over, reward) == (own_over[0], own_reward[0]) == (True, 0.0)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_limits_and_returns_of_random_actions(name: str) -> None:
    """Limits are gymnasium's, and the table's random return is what random actions get."""
    environment, generator = ENVIRONMENTS[name], np.random.default_rng(0)
    copies, found = Copies(environment, 16, seed=0), []
    for _ in range(1000):
        *_, returns = copies.step(random_actions(environment, 16, generator))
        found += [*returns[~np.isnan(returns)]]
    assert np.mean(found) == pytest.approx(environment.random, rel=0.1)


def test_limits_are_gymnasiums() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="pip install 'hesscale[rl]'")
    for name, environment in ENVIRONMENTS.items():
        assert gymnasium.spec(f"{name}-v1").max_episode_steps == environment.limit


def test_an_episode_ends_by_failure_or_by_time() -> None:
    """A time limit is no failure: the last observation is told, and a fresh episode begins."""
    copies = Copies(ENVIRONMENTS["Pendulum"], 2, seed=0)
    for age in range(1, 201):
        _, last, ended, over, returns = copies.step(np.zeros((2, 1)))
        assert not ended.any()
        assert over.all() == (age == 200) == np.isfinite(returns).all()
    assert not np.allclose(copies.observation, last)
    copies = Copies(ENVIRONMENTS["CartPole"], 1, seed=0)
    rewards = 0.0
    for _ in range(100):
        reward, last, ended, over, returns = copies.step(np.ones(1))
        rewards += reward[0]
        if over[0]:
            break
    assert ended[0]
    assert returns[0] == rewards
    assert (np.abs(copies.observation) <= 0.05).all()
    assert abs(last[0, 2]) > 0.2


def test_copies_do_not_depend_on_each_other() -> None:
    """What begins anew in one is not to change what another draws."""
    pushes = np.ones(2), np.array([1, 0])
    seen = []
    for push in pushes:
        copies = Copies(ENVIRONMENTS["CartPole"], 2, seed=0)
        trace = []
        for step in range(60):
            copies.step(np.where(step % 2, 1 - push, push))
            trace.append(copies.observation[0])
        seen.append(np.stack(trace))
    np.testing.assert_array_equal(*seen)
