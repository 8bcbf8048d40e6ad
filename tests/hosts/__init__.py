"""Hosts of their own for every service and for the client, and what happens to hosts."""
