"""A2C with a softmax policy on CartPole: AdaHesScaleGN, as in the paper, on losses in plain torch."""

import sys

import gymnasium
import torch
from torch import nn

import hesscale

torch.manual_seed(0)
again = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
envs = gymnasium.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync", vector_kwargs=again)
actor, critic = (nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs)) for outputs in (2, 1))
optimizers = [hesscale.AdaHesScaleGN(net.parameters(), lr=3e-3, bound=None) for net in (actor, critic)]

seen, running, finished = torch.from_numpy(envs.reset(seed=0)[0]), torch.zeros(8), [0.0]
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1000):
    states, actions, rewards, goes_on = [], [], [], []
    for _ in range(8):
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=actor(seen)).sample()
        after, reward, ended, cut, _ = envs.step(action.numpy())
        over, running = torch.from_numpy(ended | cut), running + torch.from_numpy(reward).float()
        finished, running = finished + running[over].tolist(), running * ~over
        for kept, value in zip((states, actions, rewards, goes_on), (seen, action, reward, ~over), strict=True):
            kept.append(torch.as_tensor(value))
        seen = torch.from_numpy(after)
    with torch.no_grad():
        value, returns = critic(seen).squeeze(-1), []
        for reward, on in zip(reversed(rewards), reversed(goes_on), strict=True):
            value = reward.float() + 0.99 * value * on
            returns.insert(0, value)
    x, target = torch.stack(states), torch.stack(returns)
    values = critic(x).squeeze(-1)
    chosen = actor(x).log_softmax(-1).gather(-1, torch.stack(actions)[..., None]).squeeze(-1)
    losses = (-((target - values.detach()) * chosen).mean(), 0.5 * ((values - target) ** 2).mean())
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad(), optimizer.backward(loss), optimizer.step()
print(f"return {sum(finished[-20:]) / len(finished[-20:]):.0f}")
