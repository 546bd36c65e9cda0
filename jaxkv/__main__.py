"""`python -m jaxkv`."""

from jaxkv.cli import main

main()
