"""`python -m outrider.cli`: the `outrider` command if it is not installed."""

from outrider.cli import main

main(prog_name="outrider")
