"""``python -m hesscale_lab.cli``, which torchrun needs."""

from . import app

app()
