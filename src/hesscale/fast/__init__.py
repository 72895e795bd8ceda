"""Only speed lives here: scratch memory, chunking, the native update. Everything works without it: HESSCALE_PLAIN=1."""

import os

from ..traced import is_traced


def enabled() -> bool:
    """Whether shortcuts are taken; ``HESSCALE_PLAIN=1`` in the environment turns all of them off.

    So does tracing: memory has no address then, and where it lies is left to the compiler.
    """
    return not is_traced() and os.environ.get("HESSCALE_PLAIN") != "1"
