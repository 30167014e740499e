"""``python -m backquant``."""

from backquant.cli import main

main()
