"""Parses the command lines of tools.

`--help` prints the tool's module docstring. A wrong argument raises ValueError, like all other user errors.
"""

import argparse
from typing import NoReturn

from glm5_jax.runtime.terminal import clean_logging


class Parser(argparse.ArgumentParser):
    """Argument parser of `python -m MODULE` that raises one-line ValueErrors.

    Args:
      module: name of the module to run.
      doc: text that `--help` prints; None: no text.
    """

    def __init__(self, module: str, doc: str | None):
        super().__init__(
            f"python -m {module}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        clean_logging()  # every program that parses its arguments here wants plain logs

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")
