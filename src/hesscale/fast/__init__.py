"""Only speed lives here: scratch memory, chunking, the native update. Everything works without it: HESSCALE_PLAIN=1."""

import os


def enabled() -> bool:
    """Whether shortcuts are taken; ``HESSCALE_PLAIN=1`` in the environment turns all of them off."""
    return os.environ.get("HESSCALE_PLAIN") != "1"
