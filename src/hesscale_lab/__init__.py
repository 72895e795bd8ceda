"""The paper's experiments and the ``hesscale`` command. Needs the extra ``[lab]``; the library never imports it."""
