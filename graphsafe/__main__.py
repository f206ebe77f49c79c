"""``python -m graphsafe`` is the command ``graphsafe``."""

from graphsafe.cli import main

main()
