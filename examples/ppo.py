"""PPO with a Gaussian policy on Pendulum: Adam in a trust region, with a step size that is large for it."""

import sys

import gymnasium
import torch
from torch import nn

from hesscale.applications.step_size import TrustRegion


def log_probability(outputs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Of actions, up to a constant; outputs are the mean and the logarithm of the variance."""
    return -0.5 * ((action - outputs[..., 0]) ** 2 * (-outputs[..., 1]).exp() + outputs[..., 1])


torch.manual_seed(0)
again = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
envs = gymnasium.make_vec("Pendulum-v1", num_envs=8, vectorization_mode="sync", vector_kwargs=again)
actor, critic = (nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, outputs)) for outputs in (2, 1))
optimizers = [TrustRegion(torch.optim.Adam(net.parameters(), lr=3e-2), delta=1e-4) for net in (actor, critic)]
x, action, reward = torch.empty(200, 8, 3), torch.empty(200, 8), torch.empty(200, 8)
seen = torch.from_numpy(envs.reset(seed=0)[0])
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 60):
    for t in range(200):
        mean, log_variance = actor(seen).detach().unbind(-1)
        x[t], action[t] = seen, mean + (0.5 * log_variance).exp() * torch.randn(8)
        after, r, *_ = envs.step(action[t, :, None].numpy())
        seen, reward[t] = torch.from_numpy(after), torch.from_numpy(r)
    with torch.no_grad():
        old, values, gain = log_probability(actor(x), action), critic(x).squeeze(-1), torch.zeros(200, 8)
        for t in reversed(range(199)):
            gain[t] = 0.1 * reward[t] + 0.95 * values[t + 1] - values[t] + 0.9 * gain[t + 1]
    for part in (part for _ in range(8) for part in torch.randperm(199).split(50)):
        ratio, scaled = (log_probability(actor(x[part]), action[part]) - old[part]).exp(), gain[part] / gain.std()
        policy = -torch.minimum(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
        value = 0.5 * ((critic(x[part]).squeeze(-1) - (gain + values)[part]) ** 2).mean()
        for optimizer, loss in zip(optimizers, (policy, value), strict=True):
            optimizer.zero_grad(), optimizer.backward(loss), optimizer.step()
print(f"return {reward.sum(0).mean():.0f}")
