"""``python -m hesscale_lab.cli``, which torchrun needs."""

from ..__main__ import main

main()
