"""Settings for the whole suite."""

from hypothesis import settings

# No deadline: the first example of a test pays for torch's start. The same examples every time: a red run can be
# repeated, and a green one stays green until the code changes.
settings.register_profile("confitune", deadline=None, derandomize=True)
settings.load_profile("confitune")
