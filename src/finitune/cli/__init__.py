"""The command line: a verb's options become its journey's Request, its Report becomes text or JSON and an exit code."""

from finitune.cli.launch import main
from finitune.cli.verbs import CLI_VERBS

__all__ = ["CLI_VERBS", "main"]
