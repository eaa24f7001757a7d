"""How long work tells its caller how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total), e.g. progress("decoding flowers102", 256, 8189)."""
