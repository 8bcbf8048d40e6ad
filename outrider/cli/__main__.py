"""`python -m outrider.cli`: the `outrider` command where it is not installed."""

from outrider.cli import main

main(prog_name="outrider")
