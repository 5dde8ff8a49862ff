"""What `fast` raises and catches; a file of its own, so that catching it loads no pass."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; "" where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def called(network: object) -> str:
    """Return what a message calls a network: a part's `network_name`, that of the network which it was taken from, else its class."""
    name = getattr(network, "network_name", "")
    return name if isinstance(name, str) and name else type(network).__name__


class Untraceable(RuntimeError):
    """The network can't be written down as a fixed sequence of operators; the message says where and why.

    Args:
        reason: where and why.
        lasting: whether it is so at every call of these shapes; what a device or a library failed in may pass.
        anyway: whether it is so whatever the shapes are, and no other example would help.
    """

    def __init__(self, reason: str, *, lasting: bool = True, anyway: bool = False) -> None:
        super().__init__(reason)
        self.lasting, self.anyway = lasting, anyway
