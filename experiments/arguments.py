"""Command lines of tools: their help is the module's own, and a wrong argument is an error like all others."""

import argparse


class Parser(argparse.ArgumentParser):
    """Of `python -m MODULE`; its errors are ValueErrors of one line. module: the name, doc: what `--help` shows."""

    def __init__(self, module: str, doc: str):
        super().__init__(
            f"python -m {module}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str):
        raise ValueError(f"{message}; see {self.prog} --help")
