"""`python -m zoo …` is the command `zoo …`; torchrun starts modules."""

import sys

from zoo.commands.entry_point import main

if __name__ == "__main__":
    sys.exit(main())
