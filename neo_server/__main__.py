"""``python -m neo_server``."""

from neo_server.cli import main

main()
