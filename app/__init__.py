"""The command line; no algorithm lives here."""
