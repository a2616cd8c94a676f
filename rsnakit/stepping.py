"""A loop of many equal steps, compiled a few steps at a time."""


class Steps:
    """A stub."""


def compile_steps(step, n):
    raise NotImplementedError
