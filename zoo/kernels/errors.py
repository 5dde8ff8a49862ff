"""What `fast` raises and catches; a file of its own, so that catching it loads no pass."""


class Untraceable(RuntimeError):
    """The network can't be written down as a fixed sequence of operators; the message says where and why."""
