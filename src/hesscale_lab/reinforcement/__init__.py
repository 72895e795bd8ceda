"""Reinforcement learning on three classic problems: losses, environments and training, many runs side by side."""
