"""Where the command `zoo` begins: Ctrl-C has its answer before anything heavy is imported."""

import signal

from zoo.commands.interrupts import answer_at_once, answer_by_exception, heard, say_interrupted


def main() -> int:
    """Run the command, and return its exit code; an interrupt at any time is one line and 130."""
    ours = answer_at_once()
    try:
        from zoo.commands.app import main as command

        if ours:  # from here on an interrupt lets the command put its things in order
            answer_by_exception()
        return command()
    except KeyboardInterrupt:
        return say_interrupted()
    except Exception:
        if heard():  # an interrupt in the middle of an import comes out as another error
            return say_interrupted()
        raise
    finally:
        if ours:  # all is done and said: Python's own end has nothing to add
            signal.signal(signal.SIGINT, signal.SIG_DFL)
